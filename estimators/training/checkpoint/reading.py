"""Checks that a checkpoint (see `snapshot`) is undamaged, and loads it."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from itertools import zip_longest
from typing import Any

import torch

from ringspark.estimators.parallel.base import GradientSync
from ringspark.estimators.parallel.layout import layout_of
from ringspark.estimators.training.average import Average
from ringspark.estimators.training.checkpoint.rank_state import RankState
from ringspark.estimators.training.checkpoint.record import FileSum, Record
from ringspark.estimators.training.checkpoint.shards import (
    LazyMapping,
    group_by_parameter,
    locate_tensors,
    map_shards,
    name_files,
    read_tensor_specs,
)
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
    if not storage.exists(storage.join(uri, RECORD)):
        raise ValueError(f"{uri} holds no training state ({RECORD} is missing); use another checkpoint")
    info = read_info(uri)
    text = storage.read_bytes(storage.join(uri, RECORD))
    if hashlib.sha256(text).hexdigest() != info.training_sha256:
        raise ValueError(
            f"{uri}/{RECORD} does not match {COMMIT}; the file is damaged, use another checkpoint"
        )
    record = Record.from_json(text, f"{uri}/{RECORD}")
    if record.position.step != info.step:
        raise ValueError(
            f"{uri} holds the weights of step {info.step} and the optimizer state of step "
            f"{record.position.step}; use another checkpoint"
        )
    return record


def verify(uri: str, progress: Callable[[], None] = lambda: None) -> Record:
    """Checks each file's size and SHA-256, and that no shard is missing; returns the checkpoint's record."""
    _refuse_links(uri, (RECORD, COMMIT))
    record = read_record(uri)
    files = _list_files(uri, record)
    _refuse_links(uri, files)
    for name in files:
        expected = _check_size(uri, name, record)
        if storage.sha256(storage.join(uri, name), progress) != expected.sha256:
            raise ValueError(
                f"{uri}/{name} has another SHA-256 than when it was written; the file is damaged, "
                "use another checkpoint"
            )
    if record.num_parts > 1:
        for kind in (WEIGHTS, OPTIMIZER, AVERAGE):
            found = [read_tensor_specs(uri, name) for name in _name_shards(kind, record) if name in files]
            try:
                locate_tensors(found, record.spreads.get(kind, {}))
            except ValueError as error:
                raise ValueError(f"{uri} is damaged: {error}; use another checkpoint") from error
    return record


def _refuse_links(uri: str, names: Sequence[str]) -> None:
    for name in names:
        if storage.is_local(uri) and os.path.islink(os.path.join(uri, name)):
            raise ValueError(f"{uri}/{name} is a link; take a checkpoint of plain files")


def _list_files(uri: str, record: Record) -> list[str]:
    if not 1 <= record.num_parts <= max(1, len(record.files)):
        raise ValueError(
            f"{uri}/{RECORD} is damaged: it has {record.num_parts} shards in {len(record.files)} files; "
            "use another checkpoint"
        )
    names = [RANKS, *(name for kind in (WEIGHTS, OPTIMIZER) for name in _name_shards(kind, record))]
    averages = _name_shards(AVERAGE, record)
    if averages[0] in record.files:
        names += averages
    if others := sorted(set(record.files) - set(names)):
        raise ValueError(
            f"{uri}/{RECORD} names {others[0]!r}, which is a file of none of its {record.num_parts} shards; "
            "use another checkpoint"
        )
    return names


def _name_shards(kind: str, record: Record) -> list[str]:
    return name_files(kind, record.num_parts, record.token)


def _check_size(uri: str, name: str, record: Record) -> FileSum:
    expected = record.files.get(name)
    if expected is None:
        raise ValueError(f"{uri}/{RECORD} lacks the size of {name}; use another checkpoint")
    try:
        size = storage.size(storage.join(uri, name))
    except FileNotFoundError as error:
        raise ValueError(f"{uri} holds no {name}; use another checkpoint") from error
    if size != expected.bytes:
        raise ValueError(
            f"{uri}/{name} has {size} bytes, but {expected.bytes} were written; the file is damaged, "
            "use another checkpoint"
        )
    return expected


def load_training_state(
    uri: str,
    sync: GradientSync,
    tick: Callable[[], None] | None = None,
    average: Average | None = None,
    *,
    is_new: bool = False,
) -> tuple[Record, list[RankState]]:
    """Loads weights, average and optimizer state from the folder `uri`. Runs on every rank.

    Returns the record, and the state of each rank that wrote the checkpoint. Calls `tick` during a download.
    `is_new`: Whether a new training starts from this state. It then freezes its own layers, and a checkpoint
    without an average starts one from its weights.
    """
    record = read_record(uri)
    layout = layout_of(sync.network)
    check_optimizer(uri, record, sync.optimizer)
    if record.ranks and not is_new:
        # Each rank lists only the layers of its own stage, so the lists are joined.
        frozen, held = ({n for rank in record.ranks for n in rank[key]} for key in ("frozen", "held"))
        named = list(sync.network.named_parameters(remove_duplicate=False))
        for name, parameter in named:
            parameter.requires_grad_(name in held or name not in frozen)
        sync.hold_new_parameters()
        if average is not None:
            average.add_new()
        for name, parameter in named:
            parameter.requires_grad_(name not in frozen)
    averages = _name_shards(AVERAGE, record)
    takes_average = average is not None and bool(average.values)
    if is_new and averages[0] not in record.files:
        takes_average = False
    # A resumed training that keeps an average needs one in the checkpoint.
    for name in {*_list_files(uri, record), *(averages if takes_average else ())}:
        _check_size(uri, name, record)
    with _open_shards(uri, OPTIMIZER, record, tick) as tensors:
        # One tensor at a time, because a rank needs only its own shard.
        state: Any = group_by_parameter(record.optimizer_values, tensors)
        sync.load_optimizer_state(state if layout is None else layout.shard_optimizer_state(state))
    for group, values in zip(sync.optimizer.param_groups, record.optimizer_groups, strict=True):
        set_group_values(group, values)
    with _open_shards(uri, WEIGHTS, record, tick) as weights:
        load_state(uri, sync.network, weights)
    if average is not None and takes_average:
        with _open_shards(uri, AVERAGE, record, tick) as averaged:
            values = dict(averaged) if layout is None else layout.shard_parameters(averaged)
            average.load(values, is_new=is_new)
    elif average is not None:
        average.restart()
    with local_file(uri, RANKS, tick) as path:
        file = StreamedFile(path)

    def read(key: str) -> torch.Tensor:
        # A copy, because a later checkpoint may remove the file while the training keeps the tensor.
        return file.read(key).clone()

    reads: list[dict[str, Callable[[], torch.Tensor]]] = [{} for _ in record.ranks]
    for key in file.slices:
        rank, _, name = key.partition("/")
        if not rank.isdigit() or int(rank) >= len(reads):
            raise ValueError(
                f"{uri}/{RANKS} has tensors of rank {rank!r}, but the record has {len(reads)} ranks; use "
                "another checkpoint"
            )
        reads[int(rank)][name] = partial(read, key)
    states = zip(reads, record.ranks, strict=True)
    return record, [RankState(tensors=LazyMapping(own), values=values) for own, values in states]


@contextmanager
def _open_shards(
    uri: str, kind: str, record: Record, tick: Callable[[], None] | None
) -> Iterator[Mapping[str, torch.Tensor]]:
    with ExitStack() as opened:
        names = _name_shards(kind, record)
        paths = [opened.enter_context(local_file(uri, name, tick)) for name in names]
        yield map_shards(paths, record.spreads.get(kind, {}))


def check_optimizer(
    uri: str, record: Record, optimizer: torch.optim.Optimizer, remedy: str = "or give runUri a new folder"
) -> None:
    name, groups = type(optimizer).__name__, len(optimizer.param_groups)
    if (record.optimizer, len(record.optimizer_groups)) != (name, groups):
        raise ValueError(
            f"{uri} is of a training with optimizer {record.optimizer} in {len(record.optimizer_groups)} "
            f"parameter groups, this one has {name} in {groups}; set the same optimizer, {remedy}"
        )


def set_group_values(group: dict[str, Any], values: Mapping[str, Any]) -> None:
    """Sets a parameter group to stored values; tensors stay tensors, and tuples stay tuples."""
    for key, value in values.items():
        present = group.get(key)
        if key in NOT_KEPT:
            continue
        if isinstance(present, torch.Tensor):
            present.fill_(value)
        else:
            group[key] = _with_tuples(present, value)


def _with_tuples(present: Any, value: Any) -> Any:
    """Returns a stored value with tuples, which JSON lacks, where the present value has them."""
    if isinstance(value, dict):
        own = present if isinstance(present, dict) else {}
        return {key: _with_tuples(own.get(key), item) for key, item in value.items()}
    if not isinstance(value, list | tuple):
        return value
    items = present if isinstance(present, list | tuple) else ()
    made = [_with_tuples(one, item) for one, item in zip_longest(items[: len(value)], value)]
    return tuple(made) if isinstance(present, tuple) else made
