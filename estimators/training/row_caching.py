"""Estimates the memory of a rank's readers: rows that wait to become batches, and rows that `cache` keeps."""

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
class CachedRows:
    """The row groups that a rank reads repeatedly; `least_bytes` leaves out rows of varying length."""

    row_groups: frozenset[int]
    num_bytes: int
    least_bytes: int


def find_cached_rows(
    config: TrainConfig, manifest: ShardManifest, split: Split, rank: int, size: int
) -> CachedRows:
    part = manifest.select(split)
    row_groups = np.asarray(part.row_groups, dtype=np.int64)
    is_training = split == "train"
    batches = config.batch_sizes
    # Held-out rows come in the same batches after every epoch. Unshuffled rows come in the same batches while
    # the batch size stays the same.
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
    return CachedRows(
        row_groups=frozenset(again.tolist()),
        num_bytes=rows * sum(widths),
        least_bytes=rows * sum(c.kind.held_bytes for c in columns if isinstance(c.kind, DENSE)),
    )


def estimate_reader_bytes(config: TrainConfig, manifest: ShardManifest) -> dict[str, int]:
    """Returns a lower bound of the bytes that a rank's readers hold in the middle of an epoch, by purpose."""
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
        kept = sum(
            find_cached_rows(config, manifest, split, 0, config.num_copies).least_bytes for split in SPLITS
        )
    # Cached rows are in flight into batches as well; count them once.
    in_flight = max(0, held.row_groups - kept)
    return {"row groups in flight": in_flight, "kept rows": kept, "batches": held.blocks}


def cache_options(
    config: TrainConfig, manifest: ShardManifest, split: Split, rank: int, size: int
) -> dict[str, Any]:
    if config.cache not in CACHES:
        return {}
    kept = find_cached_rows(config, manifest, split, rank, size)
    if not kept.num_bytes:
        return {}
    return {"cache": config.cache, "cache_bytes": kept.num_bytes, "cached_row_groups": kept.row_groups}
