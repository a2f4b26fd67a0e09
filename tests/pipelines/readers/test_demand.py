"""Memory estimates from the plan: rows that a reader holds, and rows that it reads again."""

from collections.abc import Iterator
from dataclasses import replace

import numpy as np
import pytest

from ringspark.pipelines import Array, Column, Image, Kind, Ragged, Scalar, ShardManifest, Sparse
from ringspark.pipelines.column_stats import ColumnStats
from ringspark.pipelines.epoch_plan import plan_epoch
from ringspark.pipelines.readers.demand import read_again, rows_in_flight

WIDE, NARROW = Column(name="x", kind=Array("float32", (64,))), Column(name="y", kind=Scalar("float32"))

IMAGES = Column(name="z", kind=Image(4, 8))


def _held(row_groups: list[int], num_shards: int, batch_size: int) -> int:
    """Returns the peak number of rows in the row groups with a waiting row."""
    plan = plan_epoch(row_groups, num_shards=num_shards, batch_size=batch_size, epoch=0, seed=0)
    part = plan.shard(0)
    whole = np.zeros(plan.num_steps + 2, np.int64)
    for read in part.reads():
        ends = []
        for span in read.slices:
            stream = part.deal.streams[span.stream]
            row = int(part.deal.rows_at(span.stream, np.asarray([span.stop - 1]))[0])
            ends.append((stream.position + row * stream.step) // batch_size)
        whole[read.first_step] += row_groups[read.row_group]
        whole[max(ends) + 1] -= row_groups[read.row_group]
    return int(whole.cumsum().max())


@pytest.mark.parametrize("num_shards", [1, 5, 16])
@pytest.mark.parametrize("column", [WIDE, NARROW, IMAGES], ids=["wide", "narrow", "images"])
def test_rows_are_held_by_the_row_group(column: Column, num_shards: int) -> None:
    row_groups = [2000] * 500
    whole = _held(row_groups, num_shards, 1024)
    needs = rows_in_flight(
        [column], np.asarray(row_groups), num_shards=num_shards, batch_size=1024, shuffle=True
    )
    # An image has one byte per pixel until the batch is made.
    assert 0.7 * whole <= needs.row_groups // column.kind.held_bytes <= whole


def _epochs_looked_at(row_groups: list[int], num_epochs: int, num_shards: int) -> tuple[int, list[int]]:
    looked_at: list[int] = []

    def epochs() -> Iterator[int]:
        for epoch in range(num_epochs):
            looked_at.append(epoch)
            yield epoch

    again = read_again(
        np.asarray(row_groups), epochs(), num_shards=num_shards, shard=0, batch_size=8, seed=0, shuffle=True
    )
    return len(looked_at), again.tolist()


def test_an_empty_row_group_does_not_make_the_search_go_on() -> None:
    assert _epochs_looked_at([10, 0, 10], 1000, 1) == (2, [0, 2])


def test_the_search_ends_where_a_shard_hardly_meets_a_row_group_again() -> None:
    looked_at, again = _epochs_looked_at([10] * 400, 2000, 400)
    assert looked_at <= 256
    assert len(again) < 400


@pytest.mark.parametrize(("kind", "num_bytes"), [(Ragged("int64"), 8), (Sparse(), 8), (Ragged("int8"), 1)])
def test_rows_of_varying_length_take_the_bytes_of_their_mean(kind: Kind, num_bytes: int) -> None:
    """Long rows then get small blocks; a default length would not show that rows are long."""
    column = Column(name="x", kind=kind)
    stats = {"train": {"x": ColumnStats(rows=8, values=50_000)}, "validation": {"x": ColumnStats(rows=2)}}
    manifest = ShardManifest(uri="", columns=(column, NARROW), files=(), stats=stats)
    assert manifest.mean_row_bytes(column) == 5000 * num_bytes
    assert replace(manifest, stats={}).mean_row_bytes(column) == kind.row_bytes
    assert manifest.mean_row_bytes(NARROW) == 4
