"""Predicts from the plan how much memory a reader holds and which row groups it reads again."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from itertools import islice

import numpy as np
import numpy.typing as npt

from ringspark.pipelines.columns import Column
from ringspark.pipelines.epoch_plan import EpochPlan, plan_epoch
from ringspark.pipelines.kinds import Array, Image, Scalar, Vector
from ringspark.pipelines.kinds.strings import HashBuckets, Vocabulary
from ringspark.pipelines.readers.base import block_steps

# Column types whose rows all take `row_bytes` and `held_bytes`; rows of other types may be almost empty.
DENSE = (Scalar, Array, Vector, Vocabulary, HashBuckets, Image)

# The block in use and the block being built; the queue between them may hold more.
_BLOCKS = 2

# A row group that a shard does not read twice in this many epochs is not worth its memory.
_MOST_EPOCHS = 256


@dataclass(frozen=True, kw_only=True)
class RowsInFlight:
    """Bytes of rows in a reader: in row groups, waiting for their batch, and in blocks of batches."""

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
    """Returns the smallest memory that a shard's reader holds in the middle of an epoch, without a cache."""
    widths = [column.kind.row_bytes for column in columns]
    dense = [c.kind for c in columns if isinstance(c.kind, DENSE)]
    row_bytes, held_bytes = sum(kind.row_bytes for kind in dense), sum(kind.held_bytes for kind in dense)
    plan = plan_epoch(
        row_groups, num_shards=num_shards, batch_size=batch_size, epoch=0, seed=0, shuffle=shuffle
    )
    if not row_bytes or not plan.num_rows:
        return RowsInFlight(row_groups=0, blocks=0)
    deal, own_rows = plan.shard(0).deal, plan.num_rows // num_shards
    # Pairs of a stream and a row group whose rows wait in it.
    waits: set[tuple[int, int]] = set()
    for index, stream in enumerate(deal.streams):
        if not stream.length:
            continue
        # All streams advance at the same pace: half-way through the epoch, each has used half its rows.
        waits.add((index, _slot(plan, stream.start + stream.length // 2)))
        # A row group that reaches into the next stream is read early, for that stream's first rows.
        if index + 1 < len(deal.streams):
            waits.add((index, _slot(plan, stream.start + stream.length)))
    own, slots = 0, set()
    for index, slot in waits:
        stream = deal.streams[index]
        start, stop = np.clip(plan.group_starts[slot : slot + 2] - stream.start, 0, stream.length).tolist()
        if start < stop:
            own += deal.count(index, stop) - deal.count(index, start)
            slots.add(slot)
    # A row group stays in memory until its last row is in a block.
    held = int(row_groups[plan.group_order[list(slots)]].sum()) * held_bytes
    block_rows = block_steps(widths, num_shards, batch_size) * batch_size // num_shards
    blocks = min(own_rows, _BLOCKS * block_rows)
    # Rows in blocks no longer wait.
    waiting = min(1.0, (own_rows - blocks) / max(1, own))
    return RowsInFlight(row_groups=int(held * waiting), blocks=blocks * row_bytes)


def _slot(plan: EpochPlan, row: int) -> int:
    """Returns the index in `group_order` of the row group that holds row `row` of the epoch's sequence."""
    return min(int(np.searchsorted(plan.group_starts, row, side="right")), len(plan.group_order)) - 1


def read_again(
    row_groups: npt.NDArray[np.int64],
    epochs: Iterable[int],
    *,
    num_shards: int,
    shard: int,
    batch_size: int | Callable[[int], int],
    seed: int,
    shuffle: bool,
) -> npt.NDArray[np.int64]:
    """Returns the row groups that a shard reads in at least two of the epochs, which are worth caching."""
    times = np.zeros(len(row_groups), dtype=np.int64)
    for epoch in islice(epochs, _MOST_EPOCHS):
        plan = plan_epoch(
            row_groups,
            num_shards=num_shards,
            batch_size=batch_size(epoch) if callable(batch_size) else batch_size,
            epoch=epoch,
            seed=seed,
            shuffle=shuffle,
        )
        times[plan.shard(shard).reads().row_groups] += 1
        if times[row_groups > 0].min(initial=2) >= 2:
            break
    return np.flatnonzero(times >= 2)
