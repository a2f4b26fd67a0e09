"""A sharded checkpoint: each rank with different weights writes one shard.

    model-00001-of-00004.<token>.safetensors    the second of four shards, with the whole network's names
    part-00001-of-00004.<token>.json            that shard's report, which rank 0 reads, then removes

A whole tensor is in one shard. A split tensor has pieces in several shards; `Spread`, in `training.json`,
says how to join them. File names carry the token of one attempt, so a late write of a rank of an earlier
attempt never counts as a shard of this one.
"""

from __future__ import annotations

import json
import math
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from typing import Any

import torch

from ringspark.estimators.parallel.cut import Spread, join
from ringspark.estimators.parallel.optimizer_state import StateValue
from ringspark.estimators.training.checkpoint import tensor_file
from ringspark.estimators.training.checkpoint.record import FileSum
from ringspark.pipelines import storage
from ringspark.pipelines.typed_json import parse_object, record

_LOOK_SECONDS = 0.2


class ShardError(Exception):
    """A shard of a checkpoint was not written; the message says why."""


@dataclass(frozen=True)
class CheckpointShard:
    """One shard of a checkpoint to write.

    Attributes:
        number: Number of the shard, from 0.
        of: Number of shards.
        token: Identifies this attempt to write the checkpoint; hexadecimal digits.
        seconds: Timeout of the first shard's writer for the other shards.
    """

    number: int = 0
    of: int = 1
    token: str = ""
    seconds: float = math.inf


@dataclass(frozen=True, kw_only=True)
class _ShardReport:
    files: dict[str, FileSum] = field(default_factory=dict)
    error: str = ""


def name_file(name: str, number: int, of: int, token: str) -> str:
    """Returns the file name of one shard; `name` itself if there is only one shard."""
    if of == 1:
        return name
    stem, _, ending = name.partition(".")
    return ".".join(filter(None, (f"{stem}-{number:05d}-of-{of:05d}", token, ending)))


def name_files(name: str, of: int, token: str) -> list[str]:
    """Returns the file names of all shards, in order."""
    return [name_file(name, number, of, token) for number in range(of)]


def _name_report(shard: CheckpointShard, number: int) -> str:
    return f"part-{number:05d}-of-{shard.of:05d}.{shard.token}.json"


def report_shard(uri: str, shard: CheckpointShard, files: Mapping[str, FileSum], error: str = "") -> None:
    """Reports to the writer of the first shard that this shard is written, or why not."""
    text = json.dumps(asdict(_ShardReport(files=dict(files), error=error))).encode()
    storage.write_atomic(storage.join(uri, _name_report(shard, shard.number)), text)


def wait_for_shards(uri: str, shard: CheckpointShard, check: Callable[[], None]) -> dict[str, FileSum]:
    """Waits for the reports of all other shards; returns their files. Runs on the writer of the first shard.

    Raises ShardError if a shard could not be written, or not within `shard.seconds`.

    Args:
        check: Called before each look; may raise to give up.
    """
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
        if missing and time.monotonic() >= end:
            raise ShardError(
                f"shard {min(missing)} of {shard.of} was not written within {shard.seconds:g} s; all workers "
                "must reach runUri"
            )
        if missing:
            time.sleep(_LOOK_SECONDS)
    return files


# dtype and shape of a tensor in a file.
TensorSpec = tuple[torch.dtype, tuple[int, ...]]


def locate_tensors(
    found: Sequence[Mapping[str, TensorSpec]], spreads: Mapping[str, Spread]
) -> dict[str, tuple[int, ...]]:
    """Returns the shards that hold each tensor, in the order of its pieces.

    Raises ValueError if the shards do not make up each tensor exactly once.

    Args:
        found: Tensors of each shard.
    """
    having: dict[str, list[int]] = {}
    for number, specs in enumerate(found):
        for name in specs:
            having.setdefault(name, []).append(number)
    places: dict[str, tuple[int, ...]] = {}
    for name, parts in having.items():
        spread = spreads.get(name)
        if spread is None:
            if len(parts) > 1:
                raise ValueError(f"its shards {parts} have {name!r} each")
            places[name] = (parts[0],)
            continue
        if sorted(spread.parts) != parts:
            raise ValueError(f"its shards {parts} have {name!r}, and {sorted(spread.parts)} should")
        specs_of = [found[number][name] for number in spread.parts]
        spread.check(name, [shape for _, shape in specs_of])
        if len({dtype for dtype, _ in specs_of}) > 1:
            raise ValueError(f"its shards have {name!r} in several dtypes")
        places[name] = spread.parts
    if lost := sorted(set(spreads) - set(having)):
        raise ValueError(f"no shard has {lost[0]!r}")
    return places


def read_tensor_specs(uri: str, name: str) -> dict[str, TensorSpec]:
    """Reads the tensors of a file from its header. Raises ValueError if it is no safetensors file."""
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


class ShardedTensors(Mapping[str, torch.Tensor]):
    """The tensors of all shards: views of the files; a split tensor is joined at each access."""

    def __init__(self, paths: Sequence[str], spreads: Mapping[str, Spread]) -> None:
        """Maps local files.

        Raises ValueError if a file is damaged, or the shards do not make up whole tensors.
        """
        self._files = [tensor_file.read(path) for path in paths]
        self._spreads = spreads
        found = [
            {name: (tensor.dtype, tuple(tensor.shape)) for name, tensor in file.items()}
            for file in self._files
        ]
        try:
            self._places = locate_tensors(found, spreads)
        except ValueError as error:
            raise ValueError(f"{paths[0]} is damaged: {error}; take another training state") from error

    def __getitem__(self, name: str) -> torch.Tensor:
        pieces = [self._files[number][name] for number in self._places[name]]
        spread = self._spreads.get(name)
        return pieces[0] if spread is None else join(pieces, spread.cut)

    def __iter__(self) -> Iterator[str]:
        return iter(self._places)

    def __len__(self) -> int:
        return len(self._places)


class LazyState(Mapping[str, StateValue]):
    """The optimizer state of one parameter; split tensors are joined at each access.

    Args:
        names: Names of the state in `tensors`, "<parameter>/<key>".
    """

    def __init__(
        self, plain: Mapping[str, Any], tensors: Mapping[str, torch.Tensor], names: Sequence[str]
    ) -> None:
        self._plain, self._tensors = plain, tensors
        self._names = {name.rsplit("/", 1)[1]: name for name in names}

    @classmethod
    def by_parameter(
        cls, plain: Mapping[str, Mapping[str, Any]], tensors: Mapping[str, torch.Tensor]
    ) -> dict[str, Mapping[str, StateValue]]:
        """Returns the state of all parameters."""
        names: dict[str, list[str]] = {name: [] for name in plain}
        for name in tensors:
            names.setdefault(name.rsplit("/", 1)[0], []).append(name)
        return {name: cls(plain.get(name, {}), tensors, own) for name, own in names.items()}

    def __getitem__(self, key: str) -> StateValue:
        return self._tensors[self._names[key]] if key in self._names else self._plain[key]

    def __iter__(self) -> Iterator[str]:
        return iter({**dict.fromkeys(self._plain), **dict.fromkeys(self._names)})

    def __len__(self) -> int:
        return len(set(self._plain) | set(self._names))
