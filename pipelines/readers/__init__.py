"""Readers: one file per engine, one registry, one contract.

To add an engine, write a subclass of `ShardReader` in its own file, and list it in `READERS` or declare it as
an entry point in `ENTRY_POINTS`.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Sequence
from contextlib import suppress
from importlib import import_module
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from typing import cast

from ringspark.pipelines.entry_points import load_entry_point
from ringspark.pipelines.manifest import ShardManifest
from ringspark.pipelines.readers.base import Batch, ShardReader
from ringspark.pipelines.readers.cache import CACHES

READERS: dict[str, str] = {
    "petastorm": "ringspark.pipelines.readers.petastorm_reader:PetastormReader",
    "arrow": "ringspark.pipelines.readers.arrow_reader:ArrowReader",
}
"""Import path of each engine's class, by name; Petastorm is imported only when it is used."""

ENTRY_POINTS = "ringspark.readers"

DEFAULT_CACHE_BYTES = 2 << 30

__all__ = ["READERS", "Batch", "ShardReader", "check_engine", "default_engine", "open_reader"]


def open_reader(
    manifest: ShardManifest,
    columns: Sequence[str] | None = None,
    shard: int = 0,
    num_shards: int = 1,
    batch_size: int | Callable[[int], int] = 1024,
    seed: int = 0,
    engine: str | None = None,
    shuffle: bool = True,
    cache: str | None = None,
    cache_bytes: int = DEFAULT_CACHE_BYTES,
    cached_row_groups: Collection[int] | None = None,
) -> ShardReader:
    """Opens the reader of one shard over all files of `manifest`.

    Args:
        manifest: Files to read; `manifest.select("train")` has the files of one split.
        columns: Names of the columns to read; all by default.
        shard: Index of this shard among `num_shards`.
        num_shards: Number of readers that share every batch.
        batch_size: Rows per step over all shards, or a function that returns this number for an epoch.
        seed: Any whole number; it must be equal on all shards.
        engine: A key of `READERS`; by default "petastorm" if it is installed, otherwise "arrow". All engines
            return the same bytes.
        shuffle: False keeps the rows in the order of the files.
        cache: "memory" or "disk" keeps decoded row groups for later epochs. None reads the files again in
            every epoch.
        cache_bytes: Size of the cache in bytes; row groups that do not fit are read again.
        cached_row_groups: Indexes of the row groups to cache, such as `read_again` returns; None for all.

    Raises:
        ValueError: The engine is unknown or not installed, a column is unknown, or a number is out of range.
    """
    if not isinstance(manifest, ShardManifest):
        raise ValueError(f"open_reader takes a manifest, got {manifest!r}; pass ShardManifest.load(uri)")
    engine = engine or (default_engine() if manifest.table is None else "arrow")
    check_engine(engine)
    if manifest.table is not None and engine != "arrow":
        raise ValueError(
            f"engine {engine!r} reads only shards of write_shards, but {manifest.table.uri!r} is an external "
            "table; use 'arrow'"
        )
    reader_class = _reader_class(engine)
    if cache is not None and cache not in CACHES:
        raise ValueError(f"cache must be None or one of {', '.join(CACHES)}, got {cache!r}")
    kept = None if cache is None else CACHES[cache](cache_bytes, cached_row_groups)
    return reader_class(manifest, columns, shard, num_shards, batch_size, seed, shuffle, kept)


def _reader_class(engine: str) -> type[ShardReader]:
    if engine in READERS:
        module, _, name = READERS[engine].partition(":")
        return cast("type[ShardReader]", getattr(import_module(module), name))
    part: type[ShardReader] = load_entry_point(ENTRY_POINTS, "reader", engine, READERS, ["read_tables"])
    if not issubclass(part, ShardReader):
        raise ValueError(
            f"reader {engine!r} ({part.__module__}.{part.__qualname__}) must subclass ShardReader"
        )
    return part


def check_engine(engine: str) -> None:
    """Raises ValueError if the engine is unknown or not installed."""
    if engine not in READERS:
        _reader_class(engine)
    if engine == "petastorm" and find_spec("petastorm") is None:
        raise ValueError(
            "reader 'petastorm' is not installed; pip install 'ringspark[petastorm]' or set reader='arrow'"
        )
    # Our package requires this version, but Petastorm may have been installed without it, or be a stray
    # folder.
    if engine == "petastorm" and (found := _petastorm_version()) < (0, 12, 1):
        raise ValueError(
            f"reader 'petastorm' needs Petastorm 0.12.1 or newer, got {'.'.join(map(str, found)) or 'none'}; "
            "pip install 'ringspark[petastorm]' or set reader='arrow'"
        )


def _petastorm_version() -> tuple[int, ...]:
    with suppress(PackageNotFoundError):
        return tuple(int(part) for part in re.findall(r"\d+", version("petastorm"))[:3])
    return ()


def default_engine() -> str:
    """Returns "petastorm" if Petastorm can be used here, otherwise "arrow"."""
    try:
        check_engine("petastorm")
    except ValueError:
        return "arrow"
    return "petastorm"
