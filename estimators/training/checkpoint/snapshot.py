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

The rest does not depend on the number of ranks or on the part that each holds, up to the order of
additions. Nothing in the files can run code: they are JSON and safetensors.

Invariant: a `Snapshot` shares no memory with the training, so it may be written while the training goes on.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import IO, Any

import torch

from ringspark.estimators.parallel.base import GradientSync
from ringspark.estimators.parallel.model.layout import layout_of
from ringspark.estimators.parallel.optimizer_state import OptimizerState, whole
from ringspark.estimators.training.checkpoint import tensor_file
from ringspark.estimators.training.checkpoint.rank_state import RankState
from ringspark.estimators.training.checkpoint.record import FileSum, Position, Record
from ringspark.estimators.training.checkpoint.weights import (
    COMMIT,
    WEIGHTS,
    CheckpointInfo,
    commit_checkpoint,
    load_checkpoint,
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
FILES = (WEIGHTS, OPTIMIZER, RANKS)


@dataclass(frozen=True, kw_only=True)
class Snapshot:
    """Rank 0's copy of a whole training on the CPU; `record` lacks the digests of the unwritten files."""

    weights: dict[str, torch.Tensor]
    optimizer: dict[str, torch.Tensor]
    ranks: dict[str, torch.Tensor]
    average: dict[str, torch.Tensor]
    record: Record


def take_snapshot(
    sync: GradientSync,
    position: Position,
    ranks: Sequence[RankState] = (),
    writes: bool = True,
    progress: Callable[[], None] = lambda: None,
    average: Mapping[str, torch.Tensor] | None = None,
) -> Snapshot | None:
    """Copies a training. Runs on every rank; those that do not write send their parts and get None.

    Args:
        ranks: Each rank's own state, in rank order.
        writes: Whether this rank makes the copy: rank 0, which gets the whole optimizer state.
        progress: Called after each copied tensor.
        average: The moving average of the weights; None if the training keeps none.

    Raises:
        ValueError: The optimizer keeps something that cannot be saved.
        FloatingPointError: A trained weight is not finite; raised on rank 0.
    """
    state = sync.optimizer_state()
    weights = sync.network.state_dict()
    if (layout := layout_of(sync.network)) is not None:
        weights = layout.shared(weights)
        state = layout.shared_optimizer(state)
        # Also where this rank's average is empty, as in a stage whose parameters are all frozen.
        average = None if average is None else layout.shared_parameters(average)
    if not writes:
        # All ranks exchange the parts of tensors in the same order, that of `ordered`.
        tensor_file.assist(weights)
        tensor_file.assist(average or {})
        if layout is not None:
            for own in state.values():
                for value in own.values():
                    whole(value)
        return None
    copies = _copies(weights, progress)
    averaged = _copies(average or {}, progress)
    trained = {name for name, parameter in sync.network.named_parameters() if parameter.requires_grad}
    if layout is not None:
        trained = set(layout.trained)  # by any rank
    for name in sorted(trained & copies.keys()):
        # A float64 sum of fp32 weights cannot overflow, and is not finite if one of them is not.
        if copies[name].is_floating_point() and not bool(copies[name].sum(dtype=torch.float64).isfinite()):
            raise FloatingPointError(
                f"weights {name!r} are not finite after step {position.step}; lower learningRate, set "
                "maxGradNorm, or set onNonFinite='skip'"
            )
    tensors: dict[str, torch.Tensor] = {}
    values: dict[str, dict[str, Any]] = {}
    for name, own in state.items():
        values[name] = {}
        for key, value in own.items():
            if isinstance(value, torch.Tensor):
                tensors[f"{name}/{key}"] = _copy(value)
                progress()
            else:
                values[name][key] = value
    record = Record(
        position=position,
        optimizer=type(sync.optimizer).__name__,
        optimizer_values=values,
        optimizer_groups=[group_values(group) for group in sync.optimizer.param_groups],
        ranks=[own.values for own in ranks],
    )
    joined = {f"{r}/{key}": t for r, own in enumerate(ranks) for key, t in own.tensors.items()}
    return Snapshot(weights=copies, optimizer=tensors, ranks=joined, average=averaged, record=record)


def _copies(tensors: Mapping[str, torch.Tensor], progress: Callable[[], None]) -> dict[str, torch.Tensor]:
    """Copies tensors, of which the ranks may hold parts; they send them in this order."""
    copies: dict[str, torch.Tensor] = {}
    for name in tensor_file.ordered(tensors):
        copies[name] = _copy(tensors[name])
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
    """Writes a checkpoint to the folder `uri`, its record last.

    Args:
        check: Called before each block; may raise to give up.
    """
    files = {}
    contents = dict(zip(FILES, (snapshot.weights, snapshot.optimizer, snapshot.ranks), strict=True))
    if snapshot.average:
        contents[AVERAGE] = snapshot.average
    for name, tensors in contents.items():
        with replacing(uri, name) as target:
            summed = _Summing(target, check)
            tensor_file.write(tensors, summed)  # type: ignore[arg-type]
        files[name] = FileSum(bytes=summed.num_bytes, sha256=summed.digest.hexdigest())
    text = replace(snapshot.record, files=files).to_json().encode()
    check()
    storage.write_atomic(storage.join(uri, RECORD), text)
    check()
    position = snapshot.record.position
    info = CheckpointInfo(
        epoch=position.epoch,
        step=position.step,
        num_bytes=files[WEIGHTS].bytes,
        num_tensors=len(snapshot.weights),
        training_sha256=hashlib.sha256(text).hexdigest(),
    )
    commit_checkpoint(uri, info)
    return info


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
    for name in (*FILES, AVERAGE, RECORD, COMMIT):
        if storage.is_local(uri) and os.path.islink(os.path.join(uri, name)):
            raise ValueError(f"{uri}/{name} is a link; checkpoints hold plain files, take another one")
    record = read_record(uri)
    for name in _files_of(record):
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
    return record


def _files_of(record: Record) -> list[str]:
    return [*FILES, *(name for name in [AVERAGE] if name in record.files)]


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
    if average is not None and average.values:
        _check_size(uri, AVERAGE, record)
        with local_file(uri, AVERAGE, tick) as path:
            values = tensor_file.read(path)
            average.load(values if layout is None else layout.own_parameters(values))
    for name in FILES:
        _check_size(uri, name, record)
    with local_file(uri, OPTIMIZER, tick) as path:
        state: OptimizerState = {name: dict(own) for name, own in record.optimizer_values.items()}
        # Mapped, not read, because a rank needs only its own part.
        for name, tensor in tensor_file.read(path).items():
            parameter, key = name.rsplit("/", 1)
            state.setdefault(parameter, {})[key] = tensor
        sync.load_optimizer_state(state if layout is None else layout.own_optimizer(state))
    for group, values in zip(sync.optimizer.param_groups, record.optimizer_groups, strict=True):
        set_group_values(group, values)
    load_checkpoint(uri, sync.network, tick=tick)
    with local_file(uri, RANKS, tick) as path:
        tensors = {key: tensor.clone() for key, tensor in tensor_file.read(path).items()}
    states = [RankState(tensors={}, values=values) for values in record.ranks]
    for key, tensor in tensors.items():
        rank, name = key.split("/", 1)
        if not rank.isdigit() or int(rank) >= len(states):
            raise ValueError(f"{uri}/{RANKS} speaks of rank {rank!r}, of {len(states)}; take another one")
        states[int(rank)].tensors[name] = tensor
    return record, states


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
