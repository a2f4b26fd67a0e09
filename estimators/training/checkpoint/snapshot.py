"""Copies a whole training, to resume it with any number of ranks and any sharding.

    step-<10 digits>/           one checkpoint of the whole training; the digits are the optimizer steps taken
      model.safetensors         the weights: rank 0's state dict, the adapters of `lora` not merged into it
      optimizer.safetensors     the whole optimizer state: "<parameter>/<key>" -> tensor
      average.safetensors       the moving average of the weights, where the training keeps one
      ranks.safetensors         "<rank>/random/<generator>", "<rank>/buffers/<name>", "<rank>/totals",
                                "<rank>/exchange/<name>",
                                "<rank>/metrics/<label>/<piece>/...": each rank's own state
      training.json             everything without a tensor: see `Record`; size and SHA-256 of the others
      checkpoint.json           `CheckpointInfo` with the SHA-256 of training.json; written last: it commits

Where ranks hold other weights, along the mesh's axes 'pipeline', 'tensor' and 'expert', each of them writes
a part of the first three, see `parts`. The rest does not depend on the number of ranks or on the part that
each holds, up to the order of additions. Nothing in the files can run code: they are JSON and safetensors.

Invariant: a `Snapshot` shares no memory with the training, so it may be written while the training goes on.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from typing import IO, Any

import torch

from ringspark.estimators.collectives.base import gather_bytes
from ringspark.estimators.parallel.base import GradientSync
from ringspark.estimators.parallel.layout import ModelLayout, layout_of
from ringspark.estimators.parallel.optimizer_state import OptimizerState, whole
from ringspark.estimators.training.checkpoint import tensor_file
from ringspark.estimators.training.checkpoint.parts import (
    Part,
    PartError,
    collect,
    file_of,
    files_of,
)
from ringspark.estimators.training.checkpoint.rank_state import GatheredRanks
from ringspark.estimators.training.checkpoint.record import FileSum, Position, Record
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
    """A rank's copy of what it writes of a training, on the CPU: all of it, or a part.

    Attributes:
        ranks: The states of all ranks; empty except in the first part.
        average: None if the training keeps none.
        record: Lacks the digests of the unwritten files.
        num_tensors: Weights of the whole network.
    """

    weights: dict[str, torch.Tensor]
    optimizer: dict[str, torch.Tensor]
    ranks: GatheredRanks
    average: dict[str, torch.Tensor] | None
    record: Record
    num_tensors: int
    part: Part = field(default_factory=Part)


def take_snapshot(
    sync: GradientSync,
    position: Position,
    ranks: GatheredRanks | None = None,
    writes: bool = True,
    progress: Callable[[], None] = lambda: None,
    average: Mapping[str, torch.Tensor] | None = None,
) -> Snapshot | None:
    """Copies a training. Runs on every rank; those that write nothing get None.

    Args:
        ranks: The states of all ranks; None for none.
        writes: Whether this rank copies a whole network: rank 0, which gets all of the optimizer's state.
            Of a network that is spread, each rank copies what its part of the checkpoint has.
        progress: Called after each copied tensor.
        average: The moving average of the weights; None if the training keeps none.

    Raises:
        ValueError: The optimizer keeps something that cannot be saved.
        FloatingPointError: A trained weight is not finite; raised on rank 0.
    """
    ranks = ranks or GatheredRanks()
    state = sync.optimizer_state()
    weights = sync.network.state_dict()
    if (layout := layout_of(sync.network)) is not None:
        return _take_part(sync, layout, state, weights, position, ranks, progress, average)
    if not writes:
        # All ranks exchange the parts of tensors in the same order, that of `ordered`.
        tensor_file.assist(weights)
        tensor_file.assist(average or {})
        return None
    copies = _copies(weights, progress)
    averaged = _copies(average or {}, progress)
    trained = {name for name, parameter in sync.network.named_parameters() if parameter.requires_grad}
    if (bad := _not_finite(copies, trained)) is not None:
        raise _not_finite_error(bad, position)
    values = {
        name: {key: value for key, value in own.items() if not isinstance(value, torch.Tensor)}
        for name, own in state.items()
    }
    return Snapshot(
        weights=copies,
        optimizer=_copies(_tensors_of(state), progress),
        ranks=ranks,
        average=averaged or None,
        record=_record(sync, position, values, ranks),
        num_tensors=len(copies),
    )


def _take_part(
    sync: GradientSync,
    layout: ModelLayout,
    state: OptimizerState,
    weights: Mapping[str, torch.Tensor],
    position: Position,
    ranks: GatheredRanks,
    progress: Callable[[], None],
    average: Mapping[str, torch.Tensor] | None,
) -> Snapshot | None:
    """Copies this rank's part of a network that is spread; only what describes the tensors travels."""
    mesh = layout.mesh
    values = layout.merged_values(state)
    kept = {layout.whole_name(name): own for name, own in state.items()}
    averaged = {layout.whole_name(name): tensor for name, tensor in (average or {}).items()}
    contents: dict[str, Mapping[str, torch.Tensor]] = {WEIGHTS: weights, OPTIMIZER: _tensors_of(kept)}
    if average is not None:
        # Also where this rank's is empty, as in a stage whose parameters are all frozen.
        contents[AVERAGE] = averaged
    pieces = {name: layout.pieces(tensors) for name, tensors in contents.items()}
    # A sharding may have cut what this rank has once more; then its ranks are here together.
    copies = {name: _copies(tensors, progress, pieces[name].names) for name, tensors in contents.items()}
    bad = _not_finite(copies[WEIGHTS], set(layout.trained)) or ""
    found = [text.decode() for text in gather_bytes(mesh.world, bad.encode(), to_all=False)]
    if any(found):
        raise _not_finite_error(next(filter(None, found)), position)
    if mesh.part is None:
        return None
    record = _record(sync, position, values, ranks)
    if mesh.num_parts > 1:
        spreads = {name: found.spreads for name, found in pieces.items()}
        record = replace(record, num_parts=mesh.num_parts, spreads=spreads)
    return Snapshot(
        weights=copies[WEIGHTS],
        optimizer=copies[OPTIMIZER],
        ranks=ranks,
        average=copies[AVERAGE] if AVERAGE in pieces and pieces[AVERAGE].total else None,
        record=record,
        num_tensors=pieces[WEIGHTS].total,
        part=Part(mesh.part, mesh.num_parts),
    )


def _record(
    sync: GradientSync, position: Position, values: dict[str, dict[str, Any]], ranks: GatheredRanks
) -> Record:
    return Record(
        position=position,
        optimizer=type(sync.optimizer).__name__,
        optimizer_values=values,
        optimizer_groups=[group_values(group) for group in sync.optimizer.param_groups],
        ranks=list(ranks.values),
    )


def _tensors_of(state: OptimizerState) -> dict[str, torch.Tensor]:
    return {
        f"{name}/{key}": value
        for name, own in state.items()
        for key, value in own.items()
        if isinstance(value, torch.Tensor)
    }


def _not_finite(copies: Mapping[str, torch.Tensor], trained: set[str]) -> str | None:
    """Returns the name of a trained weight that is not finite."""
    for name in sorted(trained & copies.keys()):
        # A float64 sum of fp32 weights cannot overflow, and is not finite if one of them is not.
        if copies[name].is_floating_point() and not bool(copies[name].sum(dtype=torch.float64).isfinite()):
            return name
    return None


def _not_finite_error(name: str, position: Position) -> FloatingPointError:
    return FloatingPointError(
        f"weights {name!r} are not finite after step {position.step}; lower learningRate, set maxGradNorm, "
        "or set onNonFinite='skip'"
    )


def _copies(
    tensors: Mapping[str, torch.Tensor],
    progress: Callable[[], None],
    names: frozenset[str] | None = None,
) -> dict[str, torch.Tensor]:
    """Copies tensors, of which the ranks may hold parts; they send them in this order.

    Args:
        names: Those that are wanted; None for all. Of the others, this rank only sends its parts.
    """
    copies: dict[str, torch.Tensor] = {}
    for name in tensor_file.ordered(tensors):
        if names is None or name in names:
            copies[name] = _copy(tensors[name])
        else:
            whole(tensors[name])
        progress()
    return copies


def _copy(tensor: torch.Tensor) -> torch.Tensor:
    """Returns a copy in memory of its own on the CPU, in row-major order."""
    if hasattr(tensor, "full_tensor"):
        full = whole(tensor)
        assert isinstance(full, torch.Tensor)
        return full.contiguous()
    return tensor.detach().to("cpu", copy=True, memory_format=torch.contiguous_format)


def write_snapshot(uri: str, snapshot: Snapshot, check: Callable[[], None] = lambda: None) -> CheckpointInfo:
    """Writes a checkpoint to the folder `uri`, its record last; of several parts, the first one.

    Args:
        check: Called before each block, and while other parts are missing; may raise to give up.

    Raises:
        PartError: Another part was not written.
    """
    part = snapshot.part
    files = write_part(uri, snapshot, check) | collect(uri, part, check)
    kinds = contents_of(snapshot)
    expected = {RANKS, *(name for kind in kinds for name in files_of(kind, part.of, part.token))}
    if files.keys() != expected:
        raise PartError(f"the parts are {sorted(files)}, where {sorted(expected)} should be")
    text = replace(snapshot.record, files=files, token=part.token).to_json().encode()
    check()
    storage.write_atomic(storage.join(uri, RECORD), text)
    check()
    position = snapshot.record.position
    info = CheckpointInfo(
        epoch=position.epoch,
        step=position.step,
        num_bytes=sum(files[name].bytes for name in files_of(WEIGHTS, part.of, part.token)),
        num_tensors=snapshot.num_tensors,
        training_sha256=hashlib.sha256(text).hexdigest(),
    )
    commit_checkpoint(uri, info)
    return info


def contents_of(snapshot: Snapshot) -> dict[str, dict[str, torch.Tensor]]:
    """Returns what is written in parts, by the name of the file of one part."""
    contents = {WEIGHTS: snapshot.weights, OPTIMIZER: snapshot.optimizer}
    return contents if snapshot.average is None else contents | {AVERAGE: snapshot.average}


def write_part(uri: str, snapshot: Snapshot, check: Callable[[], None] = lambda: None) -> dict[str, FileSum]:
    """Writes this rank's files; returns their lengths and digests.

    Args:
        check: As in `write_snapshot`.
    """
    part = snapshot.part
    writes: dict[str, Callable[[Any], object]] = {
        file_of(kind, part.number, part.of, part.token): partial(tensor_file.write, own)
        for kind, own in contents_of(snapshot).items()
    }
    if not part.number:
        writes[RANKS] = snapshot.ranks.write
    files = {}
    for name, write in writes.items():
        with replacing(uri, name) as target:
            summed = _Summing(target, check)
            write(summed)
        files[name] = FileSum(bytes=summed.num_bytes, sha256=summed.digest.hexdigest())
    return files


class _Summing:
    """A file to write to that counts the bytes and computes their SHA-256."""

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


# `Rates` sets the learning rates; the last four keys choose an implementation, not a result.
NOT_KEPT = ("params", "lr", "initial_lr", "foreach", "fused", "capturable", "differentiable")


def group_values(group: Mapping[str, Any]) -> dict[str, Any]:
    """Returns a parameter group's values for a checkpoint; some optimizers and callbacks change them."""
    kept: dict[str, Any] = {}
    for key, value in group.items():
        if isinstance(value, torch.Tensor) and value.numel() == 1:
            value = value.item()
        if key not in NOT_KEPT and _is_plain(value):
            kept[key] = list(value) if isinstance(value, tuple | list) else value
    return kept


def _is_plain(value: object) -> bool:
    if isinstance(value, tuple | list):
        return all(_is_plain(item) and not isinstance(item, tuple | list) for item in value)
    return value is None or isinstance(value, bool | int | float | str)
