"""What a rank's readers hold: rows on their way into batches, and rows that `cache` keeps."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import numpy as np

from ringspark.estimators.training.settings.config import TrainConfig
from ringspark.pipelines import ShardManifest
from ringspark.pipelines.manifest import SPLITS, Split
from ringspark.pipelines.readers.cache import CACHES
from ringspark.pipelines.readers.demand import DENSE, read_again, rows_in_flight


@dataclass(frozen=True, kw_only=True)
class KeptRows:
    """The row groups that a rank reads in two epochs or more.

    Attributes:
        num_bytes: Their bytes; for rows that vary in length, by their mean.
        least_bytes: Without rows that vary in length.
    """

    row_groups: frozenset[int]
    num_bytes: int
    least_bytes: int


def kept_rows(config: TrainConfig, manifest: ShardManifest, split: Split, rank: int, size: int) -> KeptRows:
    """Returns what one of `size` ranks reads more than once in a whole training."""
    part = manifest.select(split)
    row_groups = np.asarray(part.row_groups, dtype=np.int64)
    is_training = split == "train"
    batches = config.batch_sizes
    # Held-out rows come in the same batches after every epoch; those of rows that are not shuffled differ
    # where the size does.
    epochs: Iterable[int] = range(config.epochs) if config.shuffle else batches.twice_each()
    if not is_training:
        epochs = [0] * min(config.epochs, 2)
    again = read_again(
        row_groups,
        epochs,
        num_shards=size,
        shard=rank,
        batch_size=batches.size if is_training else config.batch_size,
        seed=config.seed,
        shuffle=config.shuffle or not is_training,
    )
    columns = {column.name: column for column in map(manifest.column_of, config.columns)}.values()
    widths = [
        math.ceil(manifest.mean_row_bytes(column)) if column.kind.value_bytes else column.kind.held_bytes
        for column in columns
    ]
    rows = int(row_groups[again].sum())
    return KeptRows(
        row_groups=frozenset(again.tolist()),
        num_bytes=rows * sum(widths),
        least_bytes=rows * sum(c.kind.held_bytes for c in columns if isinstance(c.kind, DENSE)),
    )


def reading_needs(config: TrainConfig, manifest: ShardManifest) -> dict[str, int]:
    """Returns, for each part, the least bytes that a rank's readers hold in the middle of an epoch."""
    columns = {column.name: column for column in map(manifest.column_of, config.columns)}
    held = rows_in_flight(
        list(columns.values()),
        np.asarray(manifest.select("train").row_groups, dtype=np.int64),
        num_shards=config.num_copies,
        batch_size=config.batch_sizes.largest,
        shuffle=config.shuffle,
    )
    kept = 0
    if config.cache == "memory":
        kept = sum(kept_rows(config, manifest, split, 0, config.num_copies).least_bytes for split in SPLITS)
    # Kept rows are on their way into batches as well; they count once.
    in_flight = max(0, held.row_groups - kept)
    return {"row groups in flight": in_flight, "kept rows": kept, "batches": held.blocks}


def caching(
    config: TrainConfig, manifest: ShardManifest, split: Split, rank: int, size: int
) -> dict[str, Any]:
    """Returns the arguments of `open_reader` that make it keep those row groups where `cache` says."""
    if config.cache not in CACHES:
        return {}
    kept = kept_rows(config, manifest, split, rank, size)
    if not kept.num_bytes:
        return {}
    return {"cache": config.cache, "cache_bytes": kept.num_bytes, "cached_row_groups": kept.row_groups}
