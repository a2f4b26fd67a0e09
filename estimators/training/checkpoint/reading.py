"""Reads the checkpoints that `snapshot` describes: checks that they are undamaged, and resumes from them."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

import torch

from ringspark.estimators.parallel.base import GradientSync
from ringspark.estimators.parallel.layout import layout_of
from ringspark.estimators.training.average import Average
from ringspark.estimators.training.checkpoint import tensor_file
from ringspark.estimators.training.checkpoint.parts import (
    JoinedFiles,
    LazyState,
    files_of,
    kinds_in,
    places_of,
)
from ringspark.estimators.training.checkpoint.rank_state import LazyTensors, RankState
from ringspark.estimators.training.checkpoint.record import FileSum, Record
from ringspark.estimators.training.checkpoint.snapshot import AVERAGE, NOT_KEPT, OPTIMIZER, RANKS, RECORD
from ringspark.estimators.training.checkpoint.streamed_file import StreamedFile
from ringspark.estimators.training.checkpoint.weights import (
    COMMIT,
    WEIGHTS,
    load_state,
    local_file,
    read_info,
)
from ringspark.pipelines import storage


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
            found = [kinds_in(uri, name) for name in _parts_of(kind, record) if name in files]
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
    names = [RANKS, *(name for kind in (WEIGHTS, OPTIMIZER) for name in _parts_of(kind, record))]
    averages = _parts_of(AVERAGE, record)
    if averages[0] in record.files:
        names += averages
    if others := sorted(set(record.files) - set(names)):
        raise ValueError(
            f"{uri}/{RECORD} names {others[0]!r}, which is none of {record.num_parts} parts; take another "
            "training state"
        )
    return names


def _parts_of(kind: str, record: Record) -> list[str]:
    return files_of(kind, record.num_parts, record.token)


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
        The record, and the states of the ranks that wrote it, for `restore_rank`, which reads their tensors
        one at a time.

    Raises:
        ValueError: There is none, it is damaged, or it belongs to another network or optimizer.
    """
    record = read_record(uri)
    layout = layout_of(sync.network)
    _check_optimizer(uri, record, sync.optimizer)
    takes_average = average is not None and bool(average.values)
    # Whether there is an average or not, a training that keeps one needs it.
    for name in {*_files_of(uri, record), *(_parts_of(AVERAGE, record) if takes_average else ())}:
        _check_size(uri, name, record)
    if average is not None and takes_average:
        with _joined_files(uri, AVERAGE, record, tick) as averaged:
            average.load(dict(averaged) if layout is None else layout.own_parameters(averaged))
    with _joined_files(uri, OPTIMIZER, record, tick) as tensors:
        # Put together one tensor at a time, because a rank needs only its own part.
        state: Any = LazyState.by_parameter(record.optimizer_values, tensors)
        sync.load_optimizer_state(state if layout is None else layout.own_optimizer(state))
    for group, values in zip(sync.optimizer.param_groups, record.optimizer_groups, strict=True):
        set_group_values(group, values)
    with _joined_files(uri, WEIGHTS, record, tick) as weights:
        load_state(uri, sync.network, weights)
    with local_file(uri, RANKS, tick) as path:
        file = StreamedFile(path)
    names: list[dict[str, str]] = [{} for _ in record.ranks]
    for key in file.places:
        rank, _, name = key.partition("/")
        if not rank.isdigit() or int(rank) >= len(names):
            raise ValueError(f"{uri}/{RANKS} speaks of rank {rank!r}, of {len(names)}; take another one")
        names[int(rank)][name] = key

    def read(key: str) -> torch.Tensor:
        # Copy the tensor, because the training may keep it after a later checkpoint has removed the file.
        return file.read(key).clone()

    return record, [
        RankState(tensors=LazyTensors(read, own), values=values)
        for own, values in zip(names, record.ranks, strict=True)
    ]


@contextmanager
def _joined_files(
    uri: str, kind: str, record: Record, tick: Callable[[], None] | None
) -> Iterator[JoinedFiles]:
    """Yields the tensors of all parts of one kind of file."""
    with ExitStack() as opened:
        names = _parts_of(kind, record)
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


def set_group_values(group: dict[str, Any], values: Mapping[str, Any]) -> None:
    """Restores the result of `group_values`, in the types that the group has."""
    for key, value in values.items():
        present = group.get(key)
        if key in NOT_KEPT:
            continue
        if isinstance(present, torch.Tensor):
            present.fill_(value)
        else:
            group[key] = tuple(value) if isinstance(present, tuple) else value
