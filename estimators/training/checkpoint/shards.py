"""A checkpoint in shards: ranks that hold different parts of the network write one shard each.

    model-00001-of-00004.<token>.safetensors    the second of four shards; tensor names of the whole network
    part-00001-of-00004.<token>.json            the report of this shard; rank 0 reads and removes the report

`CheckpointShards`, in `training.json`, says how to join the pieces of a split tensor. Each attempt to write
a checkpoint has a new token, so a late write of an earlier attempt never counts.
"""

from __future__ import annotations

import json
import math
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from functools import partial
from typing import Any, TypeVar

import torch
from torch import nn

from ringspark.estimators.parallel.optimizer_state import StateValue
from ringspark.estimators.parallel.shard_spec import CheckpointShards, join_shards
from ringspark.estimators.training.checkpoint import tensor_file
from ringspark.estimators.training.checkpoint.record import FileSum
from ringspark.pipelines import storage
from ringspark.pipelines.typed_json import parse_object, record

T = TypeVar("T")

_LOOK_SECONDS = 0.2


class ShardError(Exception):
    """A shard of a checkpoint was not written; the message says why."""


@dataclass(frozen=True)
class CheckpointShard:
    """Shard `number` (from 0) of `of` shards. The writer of shard 0 waits `seconds` for the other shards."""

    number: int = 0
    of: int = 1
    token: str = ""
    seconds: float = math.inf


@dataclass(frozen=True, kw_only=True)
class _ShardReport:
    files: dict[str, FileSum] = field(default_factory=dict)
    error: str = ""


def name_file(name: str, number: int, of: int, token: str) -> str:
    if of == 1:
        return name
    stem, _, ending = name.partition(".")
    return ".".join(filter(None, (f"{stem}-{number:05d}-of-{of:05d}", token, ending)))


def name_files(name: str, of: int, token: str) -> list[str]:
    return [name_file(name, number, of, token) for number in range(of)]


def deal_parameters(network: nn.Module, num_parts: int) -> dict[str, int]:
    """Assigns each parameter to a part: the largest first, each to the part with the fewest bytes."""
    sizes = {name: tensor.nbytes for name, tensor in network.named_parameters(remove_duplicate=False)}
    loads, parts = [0] * num_parts, {}
    for name in sorted(sizes, key=lambda name: (-sizes[name], name)):
        parts[name] = loads.index(min(loads))
        loads[parts[name]] += sizes[name]
    return parts


def _name_report(shard: CheckpointShard, number: int) -> str:
    return f"part-{number:05d}-of-{shard.of:05d}.{shard.token}.json"


def report_shard(uri: str, shard: CheckpointShard, files: Mapping[str, FileSum], error: str = "") -> None:
    """Reports to the writer of the first shard that this shard is written, or why not."""
    text = json.dumps(asdict(_ShardReport(files=dict(files), error=error))).encode()
    storage.write_atomic(storage.join(uri, _name_report(shard, shard.number)), text)


def wait_for_shards(uri: str, shard: CheckpointShard, check: Callable[[], None]) -> dict[str, FileSum]:
    """Waits for the reports of all other shards; returns the reported files. Each poll calls `check`."""
    missing = {number: _name_report(shard, number) for number in range(1, shard.of)}
    files: dict[str, FileSum] = {}
    end = time.monotonic() + shard.seconds
    while missing:
        check()
        names = set(storage.list_names(uri))
        for number, name in list(missing.items()):
            if name not in names:
                continue
            path = storage.join(uri, name)
            report = record(_ShardReport, parse_object(storage.read_bytes(path)))
            if report.error:
                raise ShardError(f"shard {number} of {shard.of}: {report.error}")
            files |= report.files
            del missing[number]
            # Some stores accept writes but refuse removals; a report left behind does no harm.
            with suppress(Exception):
                storage.remove(path)
        if missing:
            if time.monotonic() >= end:
                raise ShardError(
                    f"shard {min(missing)} of {shard.of} was not written within {shard.seconds:g} s; all "
                    "workers must reach runUri"
                )
            time.sleep(_LOOK_SECONDS)
    return files


# dtype and shape of a tensor in a file.
TensorSpec = tuple[torch.dtype, tuple[int, ...]]


def locate_tensors(
    found: Sequence[Mapping[str, TensorSpec]], spreads: Mapping[str, CheckpointShards]
) -> dict[str, tuple[int, ...]]:
    """Maps each tensor to the shards with its pieces, in order. Raises ValueError if pieces do not fit."""
    having: dict[str, list[int]] = {}
    for number, specs in enumerate(found):
        for name in specs:
            having.setdefault(name, []).append(number)
    places: dict[str, tuple[int, ...]] = {}
    for name, parts in having.items():
        spread = spreads.get(name)
        if spread is None:
            if len(parts) > 1:
                raise ValueError(f"tensor {name!r} is in shards {parts}, but must be in only one")
            places[name] = (parts[0],)
            continue
        if sorted(spread.parts) != parts:
            raise ValueError(
                f"tensor {name!r} is in shards {parts}, but must be in shards {sorted(spread.parts)}"
            )
        specs_of = [found[number][name] for number in spread.parts]
        spread.check(name, [shape for _, shape in specs_of])
        if len({dtype for dtype, _ in specs_of}) > 1:
            raise ValueError(f"the pieces of tensor {name!r} have different dtypes")
        places[name] = spread.parts
    if lost := sorted(set(spreads) - set(having)):
        raise ValueError(f"no shard has {lost[0]!r}")
    return places


def read_tensor_specs(uri: str, name: str) -> dict[str, TensorSpec]:
    """Reads the tensors of a file from its header. Raises ValueError if it is damaged."""
    try:
        with storage.open_file(storage.join(uri, name), "rb") as file:
            entries, _ = tensor_file.read_header(file)
        return {
            key: (tensor_file.DTYPES[entry["dtype"]], tuple(map(int, entry["shape"])))
            for key, entry in entries.items()
        }
    except (ValueError, LookupError, TypeError, OverflowError) as error:
        raise ValueError(
            f"{uri}/{name} is no readable safetensors file ({error}); take another one"
        ) from error


class LazyMapping(Mapping[str, T]):
    """Reads a value each time it is accessed, so that only one value has to be in memory at a time."""

    def __init__(self, reads: Mapping[str, Callable[[], T]]) -> None:
        self._reads = reads

    def __getitem__(self, name: str) -> T:
        return self._reads[name]()

    def __iter__(self) -> Iterator[str]:
        return iter(self._reads)

    def __len__(self) -> int:
        return len(self._reads)


def map_shards(paths: Sequence[str], spreads: Mapping[str, CheckpointShards]) -> LazyMapping[torch.Tensor]:
    """Memory-maps the shards and returns all tensors by name; each access joins the pieces of its tensor."""
    files = [tensor_file.read(path) for path in paths]
    found = [{name: (tensor.dtype, tuple(tensor.shape)) for name, tensor in file.items()} for file in files]
    try:
        places = locate_tensors(found, spreads)
    except ValueError as error:
        raise ValueError(f"{paths[0]} is damaged: {error}; use another checkpoint") from error

    def read(name: str) -> torch.Tensor:
        pieces = [files[number][name] for number in places[name]]
        return join_shards(pieces, spreads[name].cut) if name in spreads else pieces[0]

    return LazyMapping({name: partial(read, name) for name in places})


def group_by_parameter(
    plain: Mapping[str, Mapping[str, Any]], tensors: Mapping[str, torch.Tensor]
) -> dict[str, Mapping[str, StateValue]]:
    reads: dict[str, dict[str, Callable[[], StateValue]]] = {
        name: {key: partial(own.__getitem__, key) for key in own} for name, own in plain.items()
    }
    for name in tensors:
        parameter, key = name.rsplit("/", 1)
        reads.setdefault(parameter, {})[key] = partial(tensors.__getitem__, name)
    return {name: LazyMapping(own) for name, own in reads.items()}
