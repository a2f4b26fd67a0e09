"""Shuffle quality: the order of an epoch, compared with the statistics of a full permutation.

The rows are sorted in the files, which is the hardest case, because any remaining order is visible. Limits of
five standard deviations do not need a lucky seed.
"""

import numpy as np
import numpy.typing as npt
import pytest

from ringspark.pipelines import EpochPlan, plan_epoch
from ringspark.pipelines.shuffle import NUM_STREAMS, permutation

Order = npt.NDArray[np.int64]

BATCH_SIZE = 512
NUM_EPOCHS = 3
SHAPES = {
    "few large groups": [12_000] * 8,
    "a group per stream": [2_000] * NUM_STREAMS,
    "many groups": [200] * 480,
    "many small groups": [20] * 4_800,
}


def order_of(plan: EpochPlan) -> Order:
    """Returns each row's position in the files, in the order of the epoch."""
    order = np.full(plan.num_rows, -1, dtype=np.int64)
    first_rows = np.cumsum(plan.row_groups) - plan.row_groups
    for shard in range(plan.num_shards):
        part = plan.shard(shard)
        for read in part.reads():
            for span, rows in zip(read.slices, part.rows(read), strict=True):
                stream = part.deal.streams[span.stream]
                positions = stream.position + part.deal.rows(span.stream, span.start, span.stop) * stream.step
                order[positions] = first_rows[read.row_group] + rows
    return order


def group_order_only(plan: EpochPlan) -> Order:
    """Returns row groups in the epoch's order, with rows in the files' order: no streams."""
    stops = np.cumsum(plan.row_groups)
    groups = plan.group_order.tolist()
    return np.concatenate([np.arange(stops[g] - plan.row_groups[g], stops[g]) for g in groups])


def rank_correlation(order: Order) -> float:
    return float(np.corrcoef(order, np.arange(len(order)))[0, 1])


def neighbours(order: Order) -> float:
    """Returns the share of adjacent pairs that stay adjacent. The mean of a full permutation is 2 / rows."""
    return float(np.mean(np.abs(np.diff(order)) == 1))


def same_batch(order: Order, batch_size: int) -> float:
    """Returns the share of adjacent pairs that are in one batch afterwards."""
    batch = np.empty(len(order), dtype=np.int64)
    batch[order] = np.arange(len(order)) // batch_size
    return float(np.mean(batch[1:] == batch[:-1]))


def spread(order: Order, batch_size: int) -> float:
    """Returns the deviation of the full batches' means, divided by the deviation for independent samples."""
    means = order[: len(order) // batch_size * batch_size].reshape(-1, batch_size).mean(axis=1)
    return float(means.std() / (order.std() / np.sqrt(batch_size)))


def orders_of(row_groups: list[int], epoch: int) -> dict[str, Order]:
    plan = plan_epoch(row_groups, num_shards=1, batch_size=BATCH_SIZE, epoch=epoch, seed=0)
    return {
        "no shuffle": np.arange(plan.num_rows),
        "row-group order only": group_order_only(plan),
        "ringspark": order_of(plan),
        "full permutation": permutation(plan.num_rows, 1, epoch),
    }


@pytest.fixture(scope="module", params=SHAPES)
def row_groups(request: pytest.FixtureRequest) -> list[int]:
    return SHAPES[request.param]


@pytest.fixture(scope="module")
def orders(row_groups: list[int]) -> list[dict[str, np.ndarray]]:
    """The orders of a few epochs; all shapes have the same number of rows."""
    return [orders_of(row_groups, epoch) for epoch in range(NUM_EPOCHS)]


def full_rank_correlation(length: int) -> float:
    """Returns five standard deviations of a full permutation's rank correlation, whose mean is 0."""
    return float(5 / np.sqrt(length - 1))


def test_the_order_is_not_that_of_files(orders: list[dict[str, np.ndarray]], row_groups: list[int]) -> None:
    # With at most one row group per stream, each row group spreads over the whole epoch. With more, the row
    # groups are permuted as units, so their number limits the correlation.
    length = len(row_groups) if len(row_groups) > NUM_STREAMS else sum(row_groups)
    for order in orders:
        assert abs(rank_correlation(order["ringspark"])) < full_rank_correlation(length)
        assert abs(rank_correlation(order["full permutation"])) < full_rank_correlation(sum(row_groups))
        assert rank_correlation(order["no shuffle"]) == pytest.approx(1)


def test_neighbours_in_the_files_are_parted(orders: list[dict[str, np.ndarray]]) -> None:
    for order in orders:
        pairs = len(order["ringspark"]) - 1
        # A full permutation keeps 2 pairs on average (Poisson); 12 or more occur once in a million.
        assert neighbours(order["ringspark"]) * pairs < 12
        assert neighbours(order["full permutation"]) * pairs < 12
        assert neighbours(order["row-group order only"]) > 0.9


def test_a_batch_holds_few_neighbours(orders: list[dict[str, np.ndarray]], row_groups: list[int]) -> None:
    rows_per_group, num_rows = row_groups[0], sum(row_groups)
    # Neighbours lie anywhere within their row group's range of the epoch: NUM_STREAMS positions per row, at
    # most the whole epoch. `expected` is the share of one batch in this range.
    expected = BATCH_SIZE / min(NUM_STREAMS * rows_per_group, num_rows)
    limit = expected + 5 * np.sqrt(expected / num_rows)
    full = BATCH_SIZE / num_rows
    for order in orders:
        assert same_batch(order["ringspark"], BATCH_SIZE) < limit
        assert same_batch(order["full permutation"], BATCH_SIZE) < full + 5 * np.sqrt(full / num_rows)
        assert same_batch(order["row-group order only"], BATCH_SIZE) > limit


def test_batches_of_sorted_data_spread_as_if_drawn_from_a_row_group_per_stream(
    orders: list[dict[str, np.ndarray]], row_groups: list[int]
) -> None:
    num_batches = sum(row_groups) // BATCH_SIZE
    # With more row groups than streams, a stream contributes rows of one row group to a batch. In sorted
    # data they are alike, so a batch has the variance of NUM_STREAMS draws, and batches differ only when
    # streams change the row group.
    many = len(row_groups) > NUM_STREAMS
    draws = NUM_STREAMS if many else BATCH_SIZE
    independent = min(num_batches, len(row_groups) // NUM_STREAMS) if many else num_batches
    for order in orders:
        # A standard deviation estimated from n values has a relative standard deviation of 1 / sqrt(2 n).
        limit = np.sqrt(BATCH_SIZE / draws) * (1 + 5 / np.sqrt(2 * independent))
        assert spread(order["ringspark"], BATCH_SIZE) < limit
        assert abs(spread(order["full permutation"], BATCH_SIZE) - 1) < 5 / np.sqrt(2 * num_batches)
        assert spread(order["no shuffle"], BATCH_SIZE) > limit


def test_epochs_are_as_unlike_each_other_as_permutations() -> None:
    row_groups = [2_000] * NUM_STREAMS
    first, second = (orders_of(row_groups, epoch)["ringspark"] for epoch in (0, 1))
    position = np.empty(len(first), dtype=np.int64)
    position[first] = np.arange(len(first))
    # The second epoch's rows by their position in the first epoch.
    assert abs(rank_correlation(position[second])) < full_rank_correlation(NUM_STREAMS)
