"""Computes from the plan alone what a reader holds at once and reads again, before anything is read."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from ringspark.pipelines.columns import Column
from ringspark.pipelines.epoch_plan import plan_epoch
from ringspark.pipelines.kinds import Array, Scalar, Vector
from ringspark.pipelines.kinds.strings import HashBuckets, Vocabulary
from ringspark.pipelines.readers.base import block_steps

# Kinds whose rows all take `row_bytes`; rows of other kinds may take next to nothing.
DENSE = (Scalar, Array, Vector, Vocabulary, HashBuckets)

# The block in use and the block being made; a queue between them may hold more.
_BLOCKS = 2


@dataclass(frozen=True, kw_only=True)
class RowsInFlight:
    """The bytes that a reader holds at one moment.

    Attributes:
        row_groups: Bytes of the rows that wait in the lanes for their batch, and of the row group being read.
        blocks: Bytes of the rows that are put together to batches.
    """

    row_groups: int
    blocks: int


def rows_in_flight(
    columns: Sequence[Column],
    row_groups: npt.NDArray[np.int64],
    *,
    num_shards: int,
    batch_size: int,
    shuffle: bool,
) -> RowsInFlight:
    """Returns the least that one shard's reader holds in the middle of an epoch, without a cache.

    Args:
        columns: The columns that are read.
        row_groups: Number of rows of every row group.
    """
    widths = [column.kind.row_bytes for column in columns]
    row_bytes = sum(c.kind.row_bytes for c in columns if isinstance(c.kind, DENSE))
    plan = plan_epoch(
        row_groups, num_shards=num_shards, batch_size=batch_size, epoch=0, seed=0, shuffle=shuffle
    )
    if not row_bytes or not plan.num_rows:
        return RowsInFlight(row_groups=0, blocks=0)
    deal, own_rows = plan.shard(0).deal, plan.num_rows // num_shards
    held = int(row_groups.min())
    for index, lane in enumerate(deal.lanes):
        if not lane.length:
            continue
        # All lanes are used up at the same pace: half way through the epoch, each has used half its rows.
        group = int(np.searchsorted(plan.group_starts, lane.start + lane.length // 2, side="right")) - 1
        start, stop = np.clip(plan.group_starts[group : group + 2] - lane.start, 0, lane.length).tolist()
        held += deal.count(index, stop) - deal.count(index, start)
    block_rows = block_steps(widths, num_shards, batch_size) * batch_size // num_shards
    blocks = min(own_rows, _BLOCKS * block_rows)
    return RowsInFlight(
        row_groups=min(held, max(0, own_rows - blocks)) * row_bytes, blocks=blocks * row_bytes
    )


def read_again(
    row_groups: npt.NDArray[np.int64],
    epochs: Iterable[int],
    *,
    num_shards: int,
    shard: int,
    batch_size: int,
    seed: int,
    shuffle: bool,
) -> npt.NDArray[np.int64]:
    """Returns the row groups that one shard reads in two or more of the epochs: those worth keeping.

    In a shuffled epoch a shard reads about 1 / num_shards of the row groups, other ones each time.
    """
    times = np.zeros(len(row_groups), dtype=np.int64)
    for epoch in epochs:
        plan = plan_epoch(
            row_groups, num_shards=num_shards, batch_size=batch_size, epoch=epoch, seed=seed, shuffle=shuffle
        )
        times[plan.shard(shard).reads().row_groups] += 1
        if times.min(initial=2) >= 2:
            break
    return np.flatnonzero(times >= 2)
