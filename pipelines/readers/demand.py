"""How much a reader holds at once, from the plan alone: for whoever must know before anything is read."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from ringspark.pipelines.columns import Column
from ringspark.pipelines.epoch_plan import plan_epoch
from ringspark.pipelines.kinds import Array, Scalar, Vector
from ringspark.pipelines.kinds.strings import HashBuckets, Vocabulary
from ringspark.pipelines.readers.base import block_steps

# Kinds whose rows all take `row_bytes`; those of other kinds may take next to nothing.
_DENSE = (Scalar, Array, Vector, Vocabulary, HashBuckets)

# The block in use and the one being made; a queue between them may hold more.
_BLOCKS = 2


@dataclass(frozen=True, kw_only=True)
class RowsInFlight:
    """Bytes.

    Attributes:
        row_groups: Rows that were read and wait in the lanes for their batch, and the row group at work.
        blocks: Rows put together to batches.
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
    """What one shard's reader holds in the middle of an epoch, at least, without a cache.

    Args:
        columns: Those that are read.
        row_groups: Rows of every row group.
    """
    widths = [column.kind.row_bytes for column in columns]
    row_bytes = sum(c.kind.row_bytes for c in columns if isinstance(c.kind, _DENSE))
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
        # The lanes are used up at one pace: half way through the epoch each is half way through its rows.
        group = int(np.searchsorted(plan.group_starts, lane.start + lane.length // 2, side="right")) - 1
        start, stop = np.clip(plan.group_starts[group : group + 2] - lane.start, 0, lane.length).tolist()
        held += deal.count(index, stop) - deal.count(index, start)
    block_rows = block_steps(widths, num_shards, batch_size) * batch_size // num_shards
    blocks = min(own_rows, _BLOCKS * block_rows)
    return RowsInFlight(
        row_groups=min(held, max(0, own_rows - blocks)) * row_bytes, blocks=blocks * row_bytes
    )
