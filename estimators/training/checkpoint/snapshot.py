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
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from typing import IO, Any

import torch

from ringspark.estimators.collectives.base import gather_bytes
from ringspark.estimators.parallel.base import GradientSync
from ringspark.estimators.parallel.model.layout import ModelLayout, layout_of
from ringspark.estimators.parallel.optimizer_state import OptimizerState, whole
from ringspark.estimators.training.checkpoint import tensor_file
from ringspark.estimators.training.checkpoint.parts import (
    JoinedFiles,
    LazyState,
    Part,
    PartError,
    collect,
    file_of,
    files_of,
    kinds_in,
    places_of,
)
from ringspark.estimators.training.checkpoint.rank_state import RankState
from ringspark.estimators.training.checkpoint.record import FileSum, Position, Record
from ringspark.estimators.training.checkpoint.weights import (
    COMMIT,
    WEIGHTS,
    CheckpointInfo,
    commit_checkpoint,
    load_state,
    local_file,
    read_info,
    replacing,
)
from ringspark.estimators.training.tuning.average import Average
from ringspark.pipelines import storage

OPTIMIZER = "optimizer.safetensors"
RANKS = "ranks.safetensors"
RECORD = "training.json"
AVERAGE = "average.safetensors"


@dataclass(frozen=True, kw_only=True)
class Snapshot:
    """A rank's copy of what it writes of a training, on the CPU: all of it, or a part.

    Attributes:
        ranks: Empty but for the first part.
        average: None if the training keeps none.
        record: Lacks the digests of the unwritten files.
        num_tensors: Weights of the whole network.
    """

    weights: dict[str, torch.Tensor]
    optimizer: dict[str, torch.Tensor]
    ranks: dict[str, torch.Tensor]
    average: dict[str, torch.Tensor] | None
    record: Record
    num_tensors: int
    part: Part = field(default_factory=Part)


def take_snapshot(
    sync: GradientSync,
    position: Position,
    ranks: Sequence[RankState] = (),
    writes: bool = True,
    progress: Callable[[], None] = lambda: None,
    average: Mapping[str, torch.Tensor] | None = None,
) -> Snapshot | None:
    """Copies a training. Runs on every rank; those that write nothing get None.

    Args:
        ranks: Each rank's own state, in rank order; on rank 0.
        writes: Whether this rank copies a whole network: rank 0, which gets all of the optimizer's state.
            Of a network that is spread, each rank copies what its part of the checkpoint has.
        progress: Called after each copied tensor.
        average: The moving average of the weights; None if the training keeps none.

    Raises:
        ValueError: The optimizer keeps something that cannot be saved.
        FloatingPointError: A trained weight is not finite; raised on rank 0.
    """
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
        ranks=_joined(ranks),
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
    ranks: Sequence[RankState],
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
        ranks=_joined(ranks),
        average=copies[AVERAGE] if AVERAGE in pieces and pieces[AVERAGE].total else None,
        record=record,
        num_tensors=pieces[WEIGHTS].total,
        part=Part(mesh.part, mesh.num_parts),
    )


def _record(
    sync: GradientSync, position: Position, values: dict[str, dict[str, Any]], ranks: Sequence[RankState]
) -> Record:
    return Record(
        position=position,
        optimizer=type(sync.optimizer).__name__,
        optimizer_values=values,
        optimizer_groups=[group_values(group) for group in sync.optimizer.param_groups],
        ranks=[own.values for own in ranks],
    )


def _joined(ranks: Sequence[RankState]) -> dict[str, torch.Tensor]:
    return {f"{rank}/{key}": tensor for rank, own in enumerate(ranks) for key, tensor in own.tensors.items()}


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
    expected = {name for kind in contents_of(snapshot) for name in files_of(kind, part.of)} | {RANKS}
    if files.keys() != expected:
        raise PartError(f"the parts are {sorted(files)}, where {sorted(expected)} should be")
    text = replace(snapshot.record, files=files).to_json().encode()
    check()
    storage.write_atomic(storage.join(uri, RECORD), text)
    check()
    position = snapshot.record.position
    info = CheckpointInfo(
        epoch=position.epoch,
        step=position.step,
        num_bytes=sum(files[name].bytes for name in files_of(WEIGHTS, part.of)),
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
    contents = {file_of(kind, part.number, part.of): own for kind, own in contents_of(snapshot).items()}
    if not part.number:
        contents[RANKS] = snapshot.ranks
    files = {}
    for name, tensors in contents.items():
        with replacing(uri, name) as target:
            summed = _Summing(target, check)
            tensor_file.write(tensors, summed)  # type: ignore[arg-type]
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


def read_record(uri: str) -> Record:
    """Returns the record of the training in the checkpoint in folder `uri`.

    Raises:
        ValueError: There is none, or it is damaged.
    """
    if not storage.exists(storage.join(uri, RECORD)):
        raise ValueError(f"{uri} holds no training state ({RECORD} is missing); give one that was saved")
    info = read_info(uri)
    text = storage.read_bytes(storage.join(uri, RECORD))
    if hashlib.sha256(text).hexdigest() != info.training_sha256:
        raise ValueError(
            f"{uri}/{RECORD} is not what {COMMIT} is about; the file is damaged, take another training state"
        )
    record = Record.from_json(text, f"{uri}/{RECORD}")
    if record.position.step != info.step:
        raise ValueError(
            f"{uri} holds the weights of step {info.step} and the optimizer state of step "
            f"{record.position.step}; take another training state"
        )
    return record


def verify(uri: str, progress: Callable[[], None] = lambda: None) -> Record:
    """Returns the record of the checkpoint in folder `uri`, after checking all its files.

    Raises:
        ValueError: A file is missing, has another size or another SHA-256, or is a link.
    """
    _refuse_links(uri, (RECORD, COMMIT))
    record = read_record(uri)
    files = _files_of(uri, record)
    _refuse_links(uri, files)
    for name in files:
        expected = _check_size(uri, name, record)
        digest = hashlib.sha256()
        with storage.open_file(storage.join(uri, name), "rb") as file:
            while block := file.read(tensor_file.BLOCK_BYTES):
                digest.update(block)
                progress()
        if digest.hexdigest() != expected.sha256:
            raise ValueError(
                f"{uri}/{name} has another SHA-256 than what was written; the file is damaged, take another "
                "training state"
            )
    if record.num_parts > 1:
        for kind in (WEIGHTS, OPTIMIZER, AVERAGE):
            found = [kinds_in(uri, name) for name in files_of(kind, record.num_parts) if name in files]
            try:
                places_of(found, record.spreads.get(kind, {}))
            except ValueError as error:
                raise ValueError(f"{uri} is damaged: {error}; take another training state") from error
    return record


def _refuse_links(uri: str, names: Sequence[str]) -> None:
    for name in names:
        if storage.is_local(uri) and os.path.islink(os.path.join(uri, name)):
            raise ValueError(f"{uri}/{name} is a link; checkpoints hold plain files, take another one")


def _files_of(uri: str, record: Record) -> list[str]:
    """Returns the files of the checkpoint but its records.

    Raises:
        ValueError: The record names others, or not all.
    """
    if not 1 <= record.num_parts <= max(1, len(record.files)):
        raise ValueError(
            f"{uri}/{RECORD} speaks of {record.num_parts} parts and {len(record.files)} files; take another "
            "training state"
        )
    names = [RANKS, *(name for kind in (WEIGHTS, OPTIMIZER) for name in files_of(kind, record.num_parts))]
    averages = files_of(AVERAGE, record.num_parts)
    if averages[0] in record.files:
        names += averages
    if others := sorted(set(record.files) - set(names)):
        raise ValueError(
            f"{uri}/{RECORD} names {others[0]!r}, which is none of {record.num_parts} parts; take another "
            "training state"
        )
    return names


def _check_size(uri: str, name: str, record: Record) -> FileSum:
    """Returns the file's expected length and digest; refuses a file that is missing or of another length."""
    expected = record.files.get(name)
    if expected is None:
        raise ValueError(f"{uri}/{RECORD} does not say how long {name} is; take another training state")
    try:
        size = storage.size(storage.join(uri, name))
    except FileNotFoundError as error:
        raise ValueError(f"{uri} holds no {name} any more; take another training state") from error
    if size != expected.bytes:
        raise ValueError(
            f"{uri}/{name} has {size} bytes, {expected.bytes} were written; the file is damaged, take "
            "another training state"
        )
    return expected


def load_training_state(
    uri: str, sync: GradientSync, tick: Callable[[], None] | None = None, average: Average | None = None
) -> tuple[Record, list[RankState]]:
    """Loads weights and optimizer state of the folder `uri` into this rank's. Runs on every rank.

    Args:
        tick: Notes progress, with each block that a remote store has given.
        average: Also takes the average of the weights, if the training keeps one.

    Returns:
        The record, and the own states of the ranks that wrote it, which `restore_rank` restores.

    Raises:
        ValueError: There is none, it is damaged, or it belongs to another network or optimizer.
    """
    record = read_record(uri)
    layout = layout_of(sync.network)
    _check_optimizer(uri, record, sync.optimizer)
    files = _files_of(uri, record)
    if average is not None and average.values:
        with _joined_files(uri, AVERAGE, record, tick) as averaged:
            average.load(dict(averaged) if layout is None else layout.own_parameters(averaged))
    for name in files:
        _check_size(uri, name, record)
    with _joined_files(uri, OPTIMIZER, record, tick) as tensors:
        # Put together one tensor at a time, because a rank needs only its own part.
        state: Any = LazyState.by_parameter(record.optimizer_values, tensors)
        sync.load_optimizer_state(state if layout is None else layout.own_optimizer(state))
    for group, values in zip(sync.optimizer.param_groups, record.optimizer_groups, strict=True):
        set_group_values(group, values)
    with _joined_files(uri, WEIGHTS, record, tick) as weights:
        load_state(uri, sync.network, weights)
    with local_file(uri, RANKS, tick) as path:
        numbers = {key: tensor.clone() for key, tensor in tensor_file.read(path).items()}
    states = [RankState(tensors={}, values=values) for values in record.ranks]
    for key, tensor in numbers.items():
        rank, name = key.split("/", 1)
        if not rank.isdigit() or int(rank) >= len(states):
            raise ValueError(f"{uri}/{RANKS} speaks of rank {rank!r}, of {len(states)}; take another one")
        states[int(rank)].tensors[name] = tensor
    return record, states


@contextmanager
def _joined_files(
    uri: str, kind: str, record: Record, tick: Callable[[], None] | None
) -> Iterator[JoinedFiles]:
    """Yields the tensors of all parts of one kind of file."""
    with ExitStack() as opened:
        names = files_of(kind, record.num_parts)
        for name in names:
            _check_size(uri, name, record)
        paths = [opened.enter_context(local_file(uri, name, tick)) for name in names]
        yield JoinedFiles(paths, record.spreads.get(kind, {}))


def _check_optimizer(uri: str, record: Record, optimizer: torch.optim.Optimizer) -> None:
    name, groups = type(optimizer).__name__, len(optimizer.param_groups)
    if (record.optimizer, len(record.optimizer_groups)) != (name, groups):
        raise ValueError(
            f"{uri} is of a training with optimizer {record.optimizer} in {len(record.optimizer_groups)} "
            f"parameter groups, this one has {name} in {groups}; set the same optimizer, or give runUri a "
            "folder of its own"
        )


# `Rates` sets the learning rates; the last four keys choose an implementation, not a result.
_NOT_KEPT = ("params", "lr", "initial_lr", "foreach", "fused", "capturable", "differentiable")


def group_values(group: Mapping[str, Any]) -> dict[str, Any]:
    """Returns a parameter group's values for a checkpoint; some optimizers and callbacks change them."""
    kept: dict[str, Any] = {}
    for key, value in group.items():
        if isinstance(value, torch.Tensor) and value.numel() == 1:
            value = value.item()
        if key not in _NOT_KEPT and _is_plain(value):
            kept[key] = list(value) if isinstance(value, tuple | list) else value
    return kept


def _is_plain(value: object) -> bool:
    if isinstance(value, tuple | list):
        return all(_is_plain(item) and not isinstance(item, tuple | list) for item in value)
    return value is None or isinstance(value, bool | int | float | str)


def set_group_values(group: dict[str, Any], values: Mapping[str, Any]) -> None:
    """Restores the result of `group_values`, in the types that the group has."""
    for key, value in values.items():
        present = group.get(key)
        if key in _NOT_KEPT:
            continue
        if isinstance(present, torch.Tensor):
            present.fill_(value)
        else:
            group[key] = tuple(value) if isinstance(present, tuple) else value
