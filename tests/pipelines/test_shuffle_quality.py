"""Shuffle quality: the benchmark's measures, compared with the statistics of a full permutation.

Seeds are fixed, so runs do not differ. Limits of five standard deviations do not need a lucky seed.
"""

from __future__ import annotations

import importlib
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import numpy as np
import pytest

from ringspark.pipelines import plan_epoch
from ringspark.pipelines.shuffle import NUM_STREAMS, permutation

BATCH_SIZE = 512
NUM_EPOCHS = 3
SHAPES = {
    "few large groups": [12_000] * 8,
    "a group per stream": [2_000] * NUM_STREAMS,
    "many groups": [200] * 480,
    "many small groups": [20] * 4_800,
}


@pytest.fixture(scope="module")
def quality() -> Iterator[ModuleType]:
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(Path(__file__).resolve().parents[1] / "benchmarks"))
        yield importlib.import_module("shuffle_quality")


@pytest.fixture(scope="module", params=SHAPES)
def row_groups(request: pytest.FixtureRequest) -> list[int]:
    return SHAPES[request.param]


@pytest.fixture(scope="module")
def orders(row_groups: list[int], quality: ModuleType) -> list[dict[str, np.ndarray]]:
    """The orders of the benchmark's table, for a few epochs; all shapes have the same number of rows."""
    return [quality.orders(row_groups, epoch) for epoch in range(NUM_EPOCHS)]


def full_rank_correlation(length: int) -> float:
    """Returns five standard deviations of a full permutation's rank correlation, whose mean is 0."""
    return float(5 / np.sqrt(length - 1))


def test_the_order_has_no_rank_correlation_with_the_files(
    orders: list[dict[str, np.ndarray]], row_groups: list[int], quality: ModuleType
) -> None:
    # With at most one row group per stream, each row group spreads over the whole epoch. With more, the row
    # groups are permuted as units, so their number limits the correlation.
    length = len(row_groups) if len(row_groups) > NUM_STREAMS else sum(row_groups)
    for order in orders:
        assert abs(quality.rank_correlation(order["ringspark"])) < full_rank_correlation(length)
        assert abs(quality.rank_correlation(order["full permutation"])) < full_rank_correlation(
            sum(row_groups)
        )
        assert quality.rank_correlation(order["no shuffle"]) == pytest.approx(1)


def test_neighbours_in_the_files_are_parted(orders: list[dict[str, np.ndarray]], quality: ModuleType) -> None:
    for order in orders:
        pairs = len(order["ringspark"]) - 1
        # A full permutation keeps 2 pairs on average (Poisson); 12 or more occur once in a million.
        assert quality.neighbours(order["ringspark"]) * pairs < 12
        assert quality.neighbours(order["full permutation"]) * pairs < 12
        assert quality.neighbours(order["row-group order only"]) > 0.9


def test_a_batch_holds_few_neighbours_of_the_files(
    orders: list[dict[str, np.ndarray]], row_groups: list[int], quality: ModuleType
) -> None:
    rows_per_group, num_rows = row_groups[0], sum(row_groups)
    # Neighbours lie anywhere within their row group's range of the epoch: NUM_STREAMS positions per row, at
    # most the whole epoch. `expected` is the share of one batch in this range.
    expected = BATCH_SIZE / min(NUM_STREAMS * rows_per_group, num_rows)
    limit = expected + 5 * np.sqrt(expected / num_rows)
    full = BATCH_SIZE / num_rows
    for order in orders:
        assert quality.same_batch(order["ringspark"], BATCH_SIZE) < limit
        assert quality.same_batch(order["full permutation"], BATCH_SIZE) < full + 5 * np.sqrt(full / num_rows)
        assert quality.same_batch(order["row-group order only"], BATCH_SIZE) > limit


def test_batches_of_sorted_data_spread_as_if_drawn_from_a_row_group_per_stream(
    orders: list[dict[str, np.ndarray]], row_groups: list[int], quality: ModuleType
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
        assert quality.spread(order["ringspark"], BATCH_SIZE) < limit
        assert abs(quality.spread(order["full permutation"], BATCH_SIZE) - 1) < 5 / np.sqrt(2 * num_batches)
        assert quality.spread(order["no shuffle"], BATCH_SIZE) > limit


@pytest.mark.parametrize("num_shards", [3, 48, 64])
def test_the_quality_does_not_depend_on_the_number_of_shards(quality: ModuleType, num_shards: int) -> None:
    row_groups = [500, 0, 41, 3, 900] * 20
    alone, shared = (
        plan_epoch(row_groups, num_shards=n, batch_size=BATCH_SIZE, epoch=1, seed=4) for n in (1, num_shards)
    )
    assert quality.order_of(shared).tolist() == quality.order_of(alone).tolist()


def test_epochs_are_as_unlike_each_other_as_permutations(quality: ModuleType) -> None:
    row_groups = [2_000] * NUM_STREAMS
    first, second = (quality.orders(row_groups, epoch)["ringspark"] for epoch in (0, 1))
    position = np.empty(len(first), dtype=np.int64)
    position[first] = np.arange(len(first))
    # The second epoch's rows by their position in the first epoch.
    assert abs(quality.rank_correlation(position[second])) < full_rank_correlation(NUM_STREAMS)


def test_the_measures_know_a_sequence_from_a_permutation(quality: ModuleType) -> None:
    straight = np.arange(10_000)
    assert quality.rank_correlation(straight) == pytest.approx(1)
    assert quality.rank_correlation(straight[::-1]) == pytest.approx(-1)
    assert quality.neighbours(straight) == quality.neighbours(straight[::-1]) == 1
    assert quality.same_batch(straight, 100) == pytest.approx(0.99, abs=1e-4)
    assert quality.spread(straight, 100) == pytest.approx(10, rel=1e-3)
    assert quality.neighbours(permutation(10_000, 3)) < 12 / 10_000
