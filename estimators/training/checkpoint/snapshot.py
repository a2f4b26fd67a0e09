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
from collections.abc import Callable, Mapping, Set
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import chain
from typing import IO, Any

import torch

from ringspark.estimators.collectives.base import gather_bytes
from ringspark.estimators.parallel.base import GradientSync
from ringspark.estimators.parallel.layout import layout_of
from ringspark.estimators.parallel.mesh import RankMesh
from ringspark.estimators.parallel.optimizer_state import OptimizerState, RootOf, first_rank, gather_value
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
    num_tensors: int
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
    network, weights, layout = sync.network, sync.network.state_dict(), layout_of(sync.network)
    mesh = mesh if layout is None else layout.mesh
    part, num_parts = (0, 1) if mesh is None else (mesh.checkpoint_part, mesh.num_checkpoint_parts)
    ranks = ranks or GatheredRanks()
    root_of: RootOf = first_rank
    if layout is None:
        # Each rank gathers and keeps some parameters, so no rank ever has all of them. Buffers are rank 0's.
        root_of = partial(_part_of, deal_parameters(network, num_parts))
        state = sync.optimizer_state(root_of)
        values = {
            name: {key: value for key, value in own.items() if not isinstance(value, torch.Tensor)}
            for name, own in state.items()
        }
        trained = {name for name, parameter in network.named_parameters() if parameter.requires_grad}
    else:
        state = sync.optimizer_state()
        values, trained = layout.gather_values(state), set(layout.trained)
        state = {layout.full_name(name): own for name, own in state.items()}
        if average is not None:
            average = {layout.full_name(name): tensor for name, tensor in average.items()}
    contents = {WEIGHTS: weights, OPTIMIZER: _state_tensors(state)}
    del state  # each gathered tensor is freed after its copy
    if average is not None:
        # Even if it is empty here, as in a stage whose parameters are all frozen.
        contents[AVERAGE] = dict(average)
    shares = {} if layout is None else {kind: layout.plan_checkpoint(own) for kind, own in contents.items()}
    num_tensors = shares[WEIGHTS].total if shares else len(weights)
    copies: dict[str, dict[str, torch.Tensor]] = {}
    # If this rank's shards are sharded once more, the ranks of that sharding run this together.
    for kind, tensors in contents.items() if part is not None or layout is not None else ():
        kept = shares[kind].names if shares else {name for name in tensors if root_of(name) == part}
        copies[kind] = _copy_all(tensors, progress, kept, root_of)
    bad = _find_not_finite(copies.get(WEIGHTS, {}), trained)
    if mesh is not None and (num_parts > 1 or layout is not None):
        texts = gather_bytes(mesh.world, (bad or "").encode(), to_all=False)
        bad = next((text.decode() for text in texts if text), None)
    if bad is not None:
        raise FloatingPointError(
            f"weights {bad!r} are not finite after step {position.step}; lower learningRate, set "
            "maxGradNorm, or set onNonFinite='skip'"
        )
    if part is None:
        return None
    if AVERAGE in shares and not shares[AVERAGE].total:
        del copies[AVERAGE]
    record = Record(
        position=position,
        optimizer=type(sync.optimizer).__name__,
        optimizer_values=values,
        optimizer_groups=[group_values(group) for group in sync.optimizer.param_groups],
        ranks=list(ranks.values),
        num_parts=num_parts,
        spreads={kind: share.spreads for kind, share in shares.items()},
    )
    shard = CheckpointShard(part, num_parts)
    return Snapshot(contents=copies, ranks=ranks, record=record, num_tensors=num_tensors, shard=shard)


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


def _part_of(parts: Mapping[str, int], name: str) -> int:
    """Returns the part that holds a tensor: `name` is a parameter, a buffer or "<parameter>/<state key>"."""
    return parts[name] if name in parts else parts.get(name.rpartition("/")[0], 0)


def _copy_all(
    tensors: dict[str, torch.Tensor], progress: Callable[[], None], kept: Set[str], root_of: RootOf
) -> dict[str, torch.Tensor]:
    """Copies the tensors to keep to the CPU, in the same order on all ranks; empties `tensors`."""
    copies: dict[str, torch.Tensor] = {}
    for name in tensor_file.order_names(tensors):
        tensor = tensors.pop(name)
        value = gather_value(tensor, root_of(name))
        assert isinstance(value, torch.Tensor)
        if name in kept:
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
        num_tensors=snapshot.num_tensors,
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
