from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ringspark.pipelines.shuffle import NUM_STREAMS, Deal, OrderedDeal, ShuffledDeal, split_streams


@given(num_rows=st.integers(0, 5000))
def test_streams_cover_the_sequence_and_all_positions(num_rows: int) -> None:
    streams = split_streams(num_rows)
    assert sum(stream.length for stream in streams) == num_rows
    assert all(left.start + left.length == right.start for left, right in pairwise(streams))
    positions = [stream.position + row * stream.step for stream in streams for row in range(stream.length)]
    assert sorted(positions) == list(range(num_rows))


def _check(deal: Deal, num_rows: int) -> list[int]:
    """Checks that four methods of a deal agree; returns the positions that the deal owns."""
    owned = []
    for index, stream in enumerate(deal.streams):
        count = deal.count(index, stream.length)
        rows = deal.rows(index, 0, count)
        assert (np.diff(rows) > 0).all()
        assert all(0 <= row < stream.length for row in rows.tolist())
        assert deal.rows_at(index, np.arange(count)[::3]).tolist() == rows[::3].tolist()
        edges = np.arange(stream.length + 1)
        assert deal.counts(index, edges).tolist() == np.searchsorted(rows, edges).tolist()
        assert deal.count(index, stream.length // 3) == int((rows < stream.length // 3).sum())
        owned += [(stream.position + row * stream.step, index) for row in rows.tolist()]
    owned.sort()
    assert deal.rank(num_rows) == len(owned)
    cycle = deal.stream_cycle
    assert cycle[np.arange(len(owned)) % len(cycle)].tolist() == [index for _, index in owned]
    positions = [position for position, _ in owned]
    for position in {0, num_rows // 2, num_rows}:
        assert deal.rank(position) == int(np.searchsorted(positions, position))
    return positions


@given(num_rows=st.integers(0, 1500), num_shards=st.integers(1, 120))
def test_shuffled_positions_are_dealt_once(num_rows: int, num_shards: int) -> None:
    deals = [ShuffledDeal(num_rows, num_shards, shard) for shard in range(num_shards)]
    positions = [position for deal in deals for position in _check(deal, num_rows)]
    assert sorted(positions) == list(range(num_rows))


@given(num_rows=st.integers(0, 600), num_shards=st.integers(1, 20), batch_size=st.integers(1, 700))
def test_ordered_positions_are_dealt_once(num_rows: int, num_shards: int, batch_size: int) -> None:
    deals = [OrderedDeal(num_rows, num_shards, shard, batch_size) for shard in range(num_shards)]
    positions = [position for deal in deals for position in _check(deal, num_rows)]
    assert sorted(positions) == list(range(num_rows))


@pytest.mark.parametrize("num_shards", [1, 2, 3, 5, 7, 8, 13, 32, 40, 47, 48, 50, 64, 100, 1000])
def test_any_run_of_positions_is_balanced_over_shards(num_shards: int) -> None:
    num_rows = NUM_STREAMS * num_shards * 3
    deals = [ShuffledDeal(num_rows, num_shards, shard) for shard in range(num_shards)]
    owners = np.empty(num_rows, dtype=np.int64)
    for shard, deal in enumerate(deals):
        owners[_check(deal, num_rows)] = shard
    rng = np.random.default_rng(0)
    for _ in range(50):
        start, stop = np.sort(rng.integers(0, num_rows, 2))
        counts = np.bincount(owners[start:stop], minlength=num_shards)
        assert abs(counts - (stop - start) / num_shards).max() <= 6


@pytest.mark.parametrize("num_shards", [1, 2, 3, 4, 6, 8, 12, 16, 24, 48])
def test_divisors_of_the_number_of_streams_share_no_stream(num_shards: int) -> None:
    streams = [one for shard in range(num_shards) for one in ShuffledDeal(4800, num_shards, shard).streams]
    assert len(streams) == len(set(streams)) == NUM_STREAMS


@pytest.mark.parametrize("num_rows", [2**31 + 5, 2**41 + 11, 2**61 + 3])
@pytest.mark.parametrize("num_shards", [1, 48, 50, 1024, 102_400])
def test_a_deal_of_rows_beyond_32_bits_is_exact(num_rows: int, num_shards: int) -> None:
    deals: list[Deal] = [ShuffledDeal(num_rows, num_shards, num_shards - 1)]
    deals.append(OrderedDeal(num_rows, num_shards, num_shards - 1, 2**20 + 7))
    for deal in deals:
        total = 0
        for index, stream in enumerate(deal.streams):
            count = deal.count(index, stream.length)
            total += count
            local = np.asarray([0, count // 3, count // 2, count - 1])
            rows = deal.rows_at(index, local)
            # `rows` are owned, so counting up to and including one adds 1.
            assert deal.counts(index, rows).tolist() == local.tolist()
            assert deal.counts(index, rows + 1).tolist() == (local + 1).tolist()
            assert 0 <= rows[0] <= rows[-1] < stream.length
            position = stream.position + int(rows[-1]) * stream.step
            assert position < num_rows
            assert deal.rank(position + 1) == deal.rank(position) + 1
        assert total == deal.rank(num_rows)


@pytest.mark.parametrize("num_shards", [1, 7, 1024, 102_400])
def test_a_deal_takes_the_room_of_its_own_units(num_shards: int) -> None:
    deal = ShuffledDeal(10**9, num_shards, num_shards // 2)
    # Storing every shard's units in every shard would need the square of their number.
    assert sum(len(rows) for rows in deal._owned_rows) == NUM_STREAMS
