"""A checkpoint of several parts: one of each rank that has other weights, written by that rank itself.

    model-00001-of-00004.<token>.safetensors    the second of four parts, by the whole network's names
    part-00001-of-00004.<token>.json            what was written of it: read and removed by rank 0, which then
                                                commits

A tensor that is whole where it is lies in one part. Of one that is cut, each part has a piece: `Spread`, in
`training.json`, says how they make up the whole. Names carry the token of an attempt: what a rank of the
attempt before, which may still be alive, writes late is neither taken for a part nor takes the place of one.
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


class PartError(Exception):
    """A part of a checkpoint was not written; the message says why."""


@dataclass(frozen=True)
class Part:
    """One of the parts of a checkpoint that is written.

    Attributes:
        token: Tells this attempt to write the checkpoint from others; of hexadecimal digits.
        seconds: How long the first part waits for the others when it is written.
    """

    number: int = 0
    of: int = 1
    token: str = ""
    seconds: float = math.inf


@dataclass(frozen=True, kw_only=True)
class _Written:
    files: dict[str, FileSum] = field(default_factory=dict)
    error: str = ""


def file_of(name: str, number: int, of: int, token: str) -> str:
    """Returns the file of a part; a checkpoint of one part has the name itself."""
    if of == 1:
        return name
    stem, _, ending = name.partition(".")
    return ".".join(filter(None, (f"{stem}-{number:05d}-of-{of:05d}", token, ending)))


def files_of(name: str, of: int, token: str) -> list[str]:
    """Returns the files of all parts, in their order."""
    return [file_of(name, number, of, token) for number in range(of)]


def _told(part: Part, number: int) -> str:
    return f"part-{number:05d}-of-{part.of:05d}.{part.token}.json"


def tell(uri: str, part: Part, files: Mapping[str, FileSum], error: str = "") -> None:
    """Tells the writer of the first part that this one is on disk, or why it is not."""
    text = json.dumps(asdict(_Written(files=dict(files), error=error))).encode()
    storage.write_atomic(storage.join(uri, _told(part, part.number)), text)


def collect(uri: str, part: Part, check: Callable[[], None]) -> dict[str, FileSum]:
    """Waits for all other parts; returns their files. Runs on the writer of the first.

    Args:
        check: Called between two looks; may raise to give up.

    Raises:
        PartError: One could not be written, or was not within `part.seconds`.
    """
    missing = {number: _told(part, number) for number in range(1, part.of)}
    files: dict[str, FileSum] = {}
    end = time.monotonic() + part.seconds
    while missing:
        check()
        names = set(storage.list_names(uri))
        for number, name in list(missing.items()):
            if name not in names:
                continue
            path = storage.join(uri, name)
            written = record(_Written, parse_object(storage.read_bytes(path)))
            if written.error:
                raise PartError(f"part {number} of {part.of}: {written.error}")
            files |= written.files
            del missing[number]
            # A store may let files be written and none removed; this one spoils no checkpoint.
            with suppress(Exception):
                storage.remove(path)
        if missing and time.monotonic() >= end:
            raise PartError(
                f"part {min(missing)} of {part.of} was not written within {part.seconds:g} s; all workers "
                "must reach runUri"
            )
        if missing:
            time.sleep(_LOOK_SECONDS)
    return files


# dtype and shape of a tensor in a file.
Kind = tuple[torch.dtype, tuple[int, ...]]


def places_of(
    found: Sequence[Mapping[str, Kind]], spreads: Mapping[str, Spread]
) -> dict[str, tuple[int, ...]]:
    """Returns for each tensor the parts that have it, in the order of its pieces.

    Args:
        found: What each part has.

    Raises:
        ValueError: The parts do not make up whole tensors, each once.
    """
    having: dict[str, list[int]] = {}
    for number, kinds in enumerate(found):
        for name in kinds:
            having.setdefault(name, []).append(number)
    places: dict[str, tuple[int, ...]] = {}
    for name, parts in having.items():
        spread = spreads.get(name)
        if spread is None:
            if len(parts) > 1:
                raise ValueError(f"its parts {parts} have {name!r} each")
            places[name] = (parts[0],)
            continue
        if sorted(spread.parts) != parts:
            raise ValueError(f"its parts {parts} have {name!r}, and {sorted(spread.parts)} should")
        kinds_of = [found[number][name] for number in spread.parts]
        spread.check(name, [shape for _, shape in kinds_of])
        if len({dtype for dtype, _ in kinds_of}) > 1:
            raise ValueError(f"its parts have {name!r} in several dtypes")
        places[name] = spread.parts
    if lost := sorted(set(spreads) - set(having)):
        raise ValueError(f"no part has {lost[0]!r}")
    return places


def kinds_in(uri: str, name: str) -> dict[str, Kind]:
    """Returns what a file has by its header alone.

    Raises:
        ValueError: It is no safetensors file.
    """
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


class JoinedFiles(Mapping[str, torch.Tensor]):
    """The tensors of the files of all parts; one that is cut is put together when it is asked for.

    The others are views of the mapped files.
    """

    def __init__(self, paths: Sequence[str], spreads: Mapping[str, Spread]) -> None:
        """Maps local files.

        Raises:
            ValueError: They are not what the parts' writers wrote, or do not make up whole tensors.
        """
        self._files = [tensor_file.read(path) for path in paths]
        self._spreads = spreads
        found = [
            {name: (tensor.dtype, tuple(tensor.shape)) for name, tensor in file.items()}
            for file in self._files
        ]
        try:
            self._places = places_of(found, spreads)
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
    """What an optimizer keeps of one parameter; tensors are put together when they are asked for."""

    def __init__(
        self, plain: Mapping[str, Any], tensors: Mapping[str, torch.Tensor], names: Sequence[str]
    ) -> None:
        """Args: names: Those of `tensors`, "<parameter>/<key>"."""
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
