"""Copies a whole training, to resume it with any number of ranks and any sharding.

    step-<10 digits>/           one checkpoint; the digits are the optimizer steps taken
      model.safetensors         the state dict, adapters of `lora` not merged
      optimizer.safetensors     the optimizer state: "<parameter>/<key>" -> tensor
      average.safetensors       the moving average of the weights, if the training keeps one
      ranks.safetensors         each rank's state: "<rank>/random/<generator>", "<rank>/buffers/<name>",
                                "<rank>/totals", "<rank>/exchange/<name>", "<rank>/metrics/<label>/..."
      training.json             everything else (see `Record`), and size and SHA-256 of the files above
      checkpoint.json           `CheckpointInfo` with the SHA-256 of training.json; written last: it commits

If ranks hold different weights or `sync=Zero(...)` shards the state, each writes one shard of the first three
files (see `shards`). With a mesh, such a shard holds a slice of each tensor. With ZeRO alone it holds some
tensors, each whole.

Invariant: a `Snapshot` shares no memory with the training, so it can be written while training continues.
"""

from __future__ import annotations

import copy
import hashlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import chain
from typing import IO, Any

import torch

from ringspark.estimators.collectives.base import gather_bytes
from ringspark.estimators.parallel.base import GradientSync
from ringspark.estimators.parallel.layout import ModelLayout, layout_of
from ringspark.estimators.parallel.mesh import RankMesh
from ringspark.estimators.parallel.optimizer_state import (
    OptimizerState,
    RootOf,
    first_rank,
    gather_value,
)
from ringspark.estimators.training.checkpoint import tensor_file
from ringspark.estimators.training.checkpoint.rank_state import GatheredRanks
from ringspark.estimators.training.checkpoint.record import FileSum, Position, Record
from ringspark.estimators.training.checkpoint.shards import (
    CheckpointShard,
    ShardError,
    deal_parameters,
    name_file,
    name_files,
    wait_for_shards,
)
from ringspark.estimators.training.checkpoint.weights import (
    WEIGHTS,
    CheckpointInfo,
    commit_checkpoint,
    replacing,
)
from ringspark.pipelines import storage

OPTIMIZER = "optimizer.safetensors"
RANKS = "ranks.safetensors"
RECORD = "training.json"
AVERAGE = "average.safetensors"


@dataclass(frozen=True, kw_only=True)
class Snapshot:
    """A copy of a training's state on the CPU, which one rank writes: the whole state, or one shard.

    `contents` maps each file, `WEIGHTS`, `OPTIMIZER` and maybe `AVERAGE`, to its tensors.
    """

    contents: dict[str, dict[str, torch.Tensor]]
    ranks: GatheredRanks
    record: Record
    shard: CheckpointShard = field(default_factory=CheckpointShard)


def take_snapshot(
    sync: GradientSync,
    position: Position,
    ranks: GatheredRanks | None = None,
    mesh: RankMesh | None = None,
    progress: Callable[[], None] = lambda: None,
    average: Mapping[str, torch.Tensor] | None = None,
) -> Snapshot | None:
    """Copies a training. Runs on every rank; ranks that write nothing get None.

    Rank 0 raises FloatingPointError if a trained weight is not finite. `mesh` of None means one rank.
    """
    ranks = ranks or GatheredRanks()
    weights = sync.network.state_dict()
    if (layout := layout_of(sync.network)) is not None:
        state = sync.optimizer_state()
        return _take_shard(sync, layout, state, weights, position, ranks, progress, average)
    part, num_parts = (0, 1) if mesh is None else (mesh.checkpoint_part, mesh.num_checkpoint_parts)
    # Each rank gathers and keeps some parameters, so no rank ever has all of them. Buffers are rank 0's.
    parts = deal_parameters(sync.network, num_parts)
    root_of = partial(_part_of, parts)
    state = sync.optimizer_state(root_of)
    values = {
        name: {key: value for key, value in own.items() if not isinstance(value, torch.Tensor)}
        for name, own in state.items()
    }
    gathered = _state_tensors(state)
    del state  # each gathered tensor is freed after its copy
    copies: dict[str, dict[str, torch.Tensor]] = {}
    bad = None
    if part is not None:
        files = {WEIGHTS: weights, OPTIMIZER: gathered} | ({AVERAGE: dict(average)} if average else {})
        copies = {
            kind: _copy_all(tensors, progress, lambda name: root_of(name) == part, root_of)
            for kind, tensors in files.items()
        }
        trained = {name for name, parameter in sync.network.named_parameters() if parameter.requires_grad}
        bad = _find_not_finite(copies[WEIGHTS], trained)
    if mesh is not None and num_parts > 1:
        texts = gather_bytes(mesh.world, (bad or "").encode(), to_all=False)
        bad = next((text.decode() for text in texts if text), None)
    if bad is not None:
        raise _not_finite_error(bad, position)
    if part is None:
        return None
    record = replace(_make_record(sync, position, values, ranks), num_parts=num_parts)
    shard = CheckpointShard(part, num_parts)
    return Snapshot(contents=copies, ranks=ranks, record=record, shard=shard)


def _take_shard(
    sync: GradientSync,
    layout: ModelLayout,
    state: OptimizerState,
    weights: Mapping[str, torch.Tensor],
    position: Position,
    ranks: GatheredRanks,
    progress: Callable[[], None],
    average: Mapping[str, torch.Tensor] | None,
) -> Snapshot | None:
    """Copies this rank's shard of a network; sends only metadata to other ranks."""
    mesh = layout.mesh
    values = layout.gather_values(state)
    kept = {layout.full_name(name): own for name, own in state.items()}
    contents: dict[str, Mapping[str, torch.Tensor]] = {WEIGHTS: weights, OPTIMIZER: _state_tensors(kept)}
    if average is not None:
        # Even if it is empty here, as in a stage whose parameters are all frozen.
        contents[AVERAGE] = {layout.full_name(name): tensor for name, tensor in average.items()}
    pieces = {name: layout.plan_checkpoint(tensors) for name, tensors in contents.items()}
    # If this rank's tensors are sharded once more, the ranks of that sharding run this together.
    copies = {
        name: _copy_all(dict(tensors), progress, pieces[name].names.__contains__)
        for name, tensors in contents.items()
    }
    bad = _find_not_finite(copies[WEIGHTS], set(layout.trained)) or ""
    found = [text.decode() for text in gather_bytes(mesh.world, bad.encode(), to_all=False)]
    if any(found):
        raise _not_finite_error(next(filter(None, found)), position)
    if mesh.checkpoint_part is None:
        return None
    record = _make_record(sync, position, values, ranks)
    if mesh.num_checkpoint_parts > 1:
        spreads = {name: found.spreads for name, found in pieces.items()}
        record = replace(record, num_parts=mesh.num_checkpoint_parts, spreads=spreads)
    if AVERAGE in pieces and not pieces[AVERAGE].total:
        del copies[AVERAGE]
    return Snapshot(
        contents=copies,
        ranks=ranks,
        record=record,
        shard=CheckpointShard(mesh.checkpoint_part, mesh.num_checkpoint_parts),
    )


def _make_record(
    sync: GradientSync, position: Position, values: dict[str, dict[str, Any]], ranks: GatheredRanks
) -> Record:
    return Record(
        position=position,
        optimizer=type(sync.optimizer).__name__,
        optimizer_values=values,
        optimizer_groups=[group_values(group) for group in sync.optimizer.param_groups],
        ranks=list(ranks.values),
    )


def _state_tensors(state: OptimizerState) -> dict[str, torch.Tensor]:
    return {
        f"{name}/{key}": value
        for name, own in state.items()
        for key, value in own.items()
        if isinstance(value, torch.Tensor)
    }


def _find_not_finite(copies: Mapping[str, torch.Tensor], trained: set[str]) -> str | None:
    for name in sorted(trained & copies.keys()):
        # A float64 sum of fp32 weights cannot overflow, and is finite only if all weights are.
        if copies[name].is_floating_point() and not bool(copies[name].sum(dtype=torch.float64).isfinite()):
            return name
    return None


def _not_finite_error(name: str, position: Position) -> FloatingPointError:
    return FloatingPointError(
        f"weights {name!r} are not finite after step {position.step}; lower learningRate, set maxGradNorm, "
        "or set onNonFinite='skip'"
    )


def _part_of(parts: Mapping[str, int], name: str) -> int:
    """Returns the part that holds a tensor: `name` is a parameter, a buffer or "<parameter>/<state key>"."""
    return parts[name] if name in parts else parts.get(name.rpartition("/")[0], 0)


def _copy_all(
    tensors: dict[str, torch.Tensor],
    progress: Callable[[], None],
    keeps: Callable[[str], bool],
    root_of: RootOf = first_rank,
) -> dict[str, torch.Tensor]:
    """Copies the tensors to keep to the CPU, in the same order on all ranks; empties `tensors`."""
    copies: dict[str, torch.Tensor] = {}
    for name in tensor_file.order_names(tensors):
        tensor = tensors.pop(name)
        value = gather_value(tensor, root_of(name))
        assert isinstance(value, torch.Tensor)
        if keeps(name):
            is_copy = hasattr(tensor, "full_tensor")
            copies[name] = value.to("cpu", copy=not is_copy, memory_format=torch.contiguous_format)
        progress()
    return copies


def write_snapshot(uri: str, snapshot: Snapshot, check: Callable[[], None] = lambda: None) -> CheckpointInfo:
    """Writes the first (or only) shard, waits for the others, and commits; `check` raises to abort this."""
    shard = snapshot.shard
    files = write_shard(uri, snapshot, check) | wait_for_shards(uri, shard, check)
    names = {kind: name_files(kind, shard.of, shard.token) for kind in snapshot.contents}
    expected = {RANKS, *chain(*names.values())}
    if files.keys() != expected:
        raise ShardError(f"the shards reported {sorted(files)}, but a checkpoint needs {sorted(expected)}")
    text = replace(snapshot.record, files=files, token=shard.token).to_json().encode()
    check()
    storage.write_atomic(storage.join(uri, RECORD), text)
    check()
    position = snapshot.record.position
    info = CheckpointInfo(
        epoch=position.epoch,
        step=position.step,
        num_bytes=sum(files[name].bytes for name in names[WEIGHTS]),
        training_sha256=hashlib.sha256(text).hexdigest(),
    )
    commit_checkpoint(uri, info)
    return info


def write_shard(uri: str, snapshot: Snapshot, check: Callable[[], None] = lambda: None) -> dict[str, FileSum]:
    shard = snapshot.shard
    writes: dict[str, Callable[[Any], object]] = {
        name_file(kind, shard.number, shard.of, shard.token): partial(tensor_file.write, own)
        for kind, own in snapshot.contents.items()
    }
    if not shard.number:
        writes[RANKS] = snapshot.ranks.write
    files = {}
    for name, write in writes.items():
        with replacing(uri, name) as target:
            hashing = _HashingFile(target, check)
            write(hashing)
        files[name] = FileSum(bytes=hashing.num_bytes, sha256=hashing.digest.hexdigest())
    return files


class _HashingFile:
    def __init__(self, file: IO[bytes], check: Callable[[], None]) -> None:
        self._file = file
        self._check = check
        self.num_bytes = 0
        self.digest = hashlib.sha256()

    def write(self, data: Any) -> int:
        self._check()
        self.digest.update(data)
        self.num_bytes += len(data)
        self._file.write(data)
        return len(data)


# `LearningRates` sets the rates; the last four keys choose an implementation, not a result.
NOT_KEPT = ("params", "lr", "initial_lr", "foreach", "fused", "capturable", "differentiable")


def group_values(group: Mapping[str, Any]) -> dict[str, Any]:
    kept: dict[str, Any] = {}
    for key, value in group.items():
        if isinstance(value, torch.Tensor) and value.numel() == 1:
            value = value.item()
        if key not in NOT_KEPT and _is_plain(value):
            kept[key] = copy.deepcopy(value)  # written while the training continues
    return kept


def _is_plain(value: object) -> bool:
    if isinstance(value, tuple | list):
        return all(map(_is_plain, value))
    if isinstance(value, dict):
        return all(isinstance(key, str) and _is_plain(item) for key, item in value.items())
    return value is None or isinstance(value, bool | int | float | str)
