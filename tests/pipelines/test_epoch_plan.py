import hashlib
import itertools
import tracemalloc
from typing import Any

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from ringspark.pipelines.epoch_plan import EpochPlan, plan_epoch
from ringspark.pipelines.shuffle import split_streams

Rows = list[tuple[int, int]]

row_group_lists = st.lists(st.integers(0, 60), max_size=12)
shard_counts = st.sampled_from([1, 2, 3, 4, 5, 6, 7, 50, 100])


def plan_of(
    row_groups: Any, num_shards: Any = 1, batch_size: Any = 1, epoch: Any = 0, **changes: Any
) -> EpochPlan:
    settings = {"num_shards": num_shards, "batch_size": batch_size, "epoch": epoch, "seed": 5} | changes
    return plan_epoch(row_groups, **settings)


def shard_rows(plan: EpochPlan, shard: int, start_step: int = 0) -> list[Rows]:
    """Follows a shard's reads one by one; returns (row group, row) of every row of every step."""
    part = plan.shard(shard)
    streams: list[list[tuple[int, Rows]]] = [[] for _ in part.deal.streams]
    for read in part.reads(start_step):
        for span, rows in zip(read.slices, part.rows(read), strict=True):
            assert len(rows) == span.stop - span.start > 0
            streams[span.stream].append((span.start, [(read.row_group, row) for row in rows.tolist()]))
    queues = [iter([row for _, rows in sorted(stream) for row in rows]) for stream in streams]
    bounds = part.bounds(start_step, plan.num_steps)
    cycle = part.deal.stream_cycle
    order = cycle[np.arange(bounds[0], bounds[-1]) % len(cycle)].tolist()
    sequence = [next(queues[stream]) for stream in order]
    assert all(next(queue, None) is None for queue in queues), "rows were read that no step uses"
    return [sequence[start - bounds[0] : stop - bounds[0]] for start, stop in itertools.pairwise(bounds)]


def epoch_order(plan: EpochPlan) -> Rows:
    """Computes the order from the module's docstring: all rows in sequence, dealt to positions by the
    streams.
    """
    sequence = [(group, row) for group in plan.group_order.tolist() for row in plan.row_order(group).tolist()]
    if not plan.shuffle:
        return sequence
    streams = split_streams(len(sequence))
    position_of = [stream.position + row * stream.step for stream in streams for row in range(stream.length)]
    return [row for _, row in sorted(zip(position_of, sequence, strict=True))]


def global_batches(plan: EpochPlan) -> list[frozenset[tuple[int, int]]]:
    shards = [shard_rows(plan, shard) for shard in range(plan.num_shards)]
    assert {len(steps) for steps in shards} == {plan.num_steps}
    batches = []
    for step in range(plan.num_steps):
        rows = [row for steps in shards for row in steps[step]]
        counts = [plan.shard_rows(step, shard) for shard in range(plan.num_shards)]
        assert [len(steps[step]) for steps in shards] == counts
        assert len(rows) == len(set(rows)) == plan.global_rows(step)
        batches.append(frozenset(rows))
    return batches


@given(row_groups=row_group_lists, num_shards=shard_counts, batch=st.integers(1, 80), shuffle=st.booleans())
@example(row_groups=[], num_shards=2, batch=1, shuffle=True)
@example(row_groups=[0, 0, 0], num_shards=48, batch=1000, shuffle=True)
@example(row_groups=[0, 1, 0], num_shards=100, batch=1000, shuffle=True)
@example(row_groups=[1, 0, 2, 0], num_shards=48, batch=2, shuffle=False)
def test_every_row_is_in_exactly_one_batch(row_groups, num_shards, batch, shuffle):
    plan = plan_of(row_groups, num_shards, batch, 1, shuffle=shuffle)
    batches = global_batches(plan)
    sizes = [len(rows) for rows in batches]
    assert sizes[:-1] == [batch] * (len(sizes) - 1)
    assert plan.num_steps == -(-sum(row_groups) // batch)
    assert sum(sizes) == sum(row_groups)
    assert frozenset().union(*batches) == {(g, r) for g, rows in enumerate(row_groups) for r in range(rows)}


@given(
    row_groups=row_group_lists,
    num_shards=shard_counts,
    batch=st.integers(1, 40),
    shuffle=st.booleans(),
    data=st.data(),
)
def test_resuming_gives_the_tail_of_the_epoch(row_groups, num_shards, batch, shuffle, data):
    plan = plan_of(row_groups, num_shards, batch, 2, shuffle=shuffle)
    start = data.draw(st.integers(0, plan.num_steps))
    shard = data.draw(st.integers(0, num_shards - 1))
    assert shard_rows(plan, shard, start) == shard_rows(plan, shard)[start:]


@settings(max_examples=60)
@given(
    row_groups=row_group_lists,
    shards=st.tuples(shard_counts, shard_counts),
    batch=st.integers(1, 40),
    seed=st.integers(-(2**63), 2**64),
    epoch=st.integers(0, 2**40),
    shuffle=st.booleans(),
    data=st.data(),
)
def test_the_number_of_shards_may_change_in_the_middle_of_an_epoch(
    row_groups, shards, batch, seed, epoch, shuffle, data
):
    before, after = (plan_of(row_groups, n, batch, epoch, seed=seed, shuffle=shuffle) for n in shards)
    change = data.draw(st.integers(0, before.num_steps))
    head = [shard_rows(before, shard)[:change] for shard in range(shards[0])]
    tail = [shard_rows(after, shard, change) for shard in range(shards[1])]
    batches = [
        [row for steps in part for row in steps[step]]
        for part, num_steps in ((head, change), (tail, before.num_steps - change))
        for step in range(num_steps)
    ]
    assert sorted(itertools.chain(*batches)) == [
        (g, r) for g, rows in enumerate(row_groups) for r in range(rows)
    ]
    order = epoch_order(before)
    assert [set(rows) for rows in batches] == [
        set(order[start : start + batch]) for start in range(0, len(order), batch)
    ]


@given(
    row_groups=row_group_lists,
    num_shards=shard_counts,
    batch=st.integers(1, 80),
    seed=st.integers(-(2**63), 2**64),
    epoch=st.integers(0, 2**40),
    shuffle=st.booleans(),
)
def test_the_order_is_drawn_from_seed_epoch_and_row_groups_alone(
    row_groups, num_shards, batch, seed, epoch, shuffle
):
    plan = plan_of(row_groups, num_shards, batch, epoch, seed=seed, shuffle=shuffle)
    alone = plan_of(row_groups, epoch=epoch, seed=seed, shuffle=shuffle)
    position_of = {row: position for position, row in enumerate(epoch_order(alone))}
    for shard in range(min(num_shards, 8)):
        for step, rows in enumerate(shard_rows(plan, shard)):
            positions = [position_of[row] for row in rows]
            assert positions == sorted(positions), "a shard must keep the order of the epoch"
            assert all(position // batch == step for position in positions)


@given(
    row_groups=row_group_lists,
    num_shards=shard_counts,
    batch=st.integers(1, 40),
    shuffle=st.booleans(),
    data=st.data(),
)
def test_resuming_reads_no_row_group_that_is_used_up(row_groups, num_shards, batch, shuffle, data):
    plan = plan_of(row_groups, num_shards, batch, shuffle=shuffle)
    start = data.draw(st.integers(0, plan.num_steps))
    shard = data.draw(st.integers(0, num_shards - 1))
    reads = plan.shard(shard).reads(start)
    needed = {group for rows in shard_rows(plan, shard)[start:] for group, _ in rows}
    assert len(reads) == len(needed)
    assert {read.row_group for read in reads} == set(reads.row_groups.tolist()) == needed
    assert all(read.first_step >= start for read in reads)


@given(row_groups=row_group_lists, num_shards=shard_counts, batch=st.integers(1, 80))
def test_without_shuffling_the_shards_parts_of_a_step_follow_each_other(row_groups, num_shards, batch):
    plan = plan_of(row_groups, num_shards, batch, 4, shuffle=False)
    shards = [shard_rows(plan, shard) for shard in range(num_shards)]
    rows = [row for step in zip(*shards, strict=True) for part in step for row in part]
    assert rows == [(g, r) for g, size in enumerate(row_groups) for r in range(size)]


@given(row_groups=row_group_lists, num_shards=shard_counts, batch=st.integers(1, 40), shuffle=st.booleans())
def test_reads_come_in_the_order_of_need_and_only_once(row_groups, num_shards, batch, shuffle):
    plan = plan_of(row_groups, num_shards, batch, shuffle=shuffle)
    for shard in range(min(num_shards, 4)):
        reads = plan.shard(shard).reads()
        steps = shard_rows(plan, shard)
        assert len({read.row_group for read in reads}) == len(reads)
        assert [read.first_step for read in reads] == sorted(read.first_step for read in reads)
        for read in reads:
            users = (step for step, rows in enumerate(steps) if read.row_group in {each for each, _ in rows})
            assert read.first_step == next(users)


@pytest.mark.parametrize("num_shards", [2, 3, 5, 7, 48, 64])
def test_a_shard_reads_little_more_than_its_part(num_shards: int) -> None:
    plan = plan_epoch([64] * 480, num_shards=num_shards, batch_size=512, epoch=0, seed=0)
    for shard in range(num_shards):
        # A stream has ten row groups; each end may share a row group and a stream with a neighbour.
        assert len(plan.shard(shard).reads()) <= 480 / num_shards + 2 * (10 + 1)


@pytest.mark.parametrize("num_shards", [1, 2, 5, 48, 64])
@pytest.mark.parametrize(
    "row_groups",
    [[32] * 960, [32] * 970, [20] * 3000, [9, 70, 0, 41] * 240, [3000] * 10, [30_000]],
    ids=["20 per stream", "not even", "many small", "mixed", "few large", "one"],
)
def test_two_row_groups_per_stream_are_held_from_step_to_step(row_groups: list[int], num_shards: int) -> None:
    plan = plan_epoch(row_groups, num_shards=num_shards, batch_size=64, epoch=0, seed=0)
    part = plan.shard(num_shards // 2)
    held = np.zeros((len(part.deal.streams), plan.num_steps + 1), dtype=np.int64)
    for read in part.reads():
        for span in read.slices:
            stream = part.deal.streams[span.stream]
            last_row = int(part.deal.rows(span.stream, span.stop - 1, span.stop)[0])
            last_step = (stream.position + last_row * stream.step) // plan.batch_size
            # Row groups held at the start of a step that does not read them.
            held[span.stream, read.first_step + 1 : last_step + 1] += 1
    assert held.max(initial=0) <= 2
    assert held.sum(axis=0).max(initial=0) <= 96 / num_shards + 4


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"num_shards": 0}, "num_shards must be at least 1, got 0"),
        ({"batch_size": 0}, "batch_size must be at least 1"),
        ({"epoch": -1}, "epoch must be at least 0"),
        ({"row_groups": [1, 2**40]}, r"fewer than 2\*\*40 rows each, got 1099511627776"),
        (
            {"row_groups": np.asarray([2**64 - 1], dtype=np.uint64)},
            r"fewer than 2\*\*40 rows each, got 18446744073709551615",
        ),
        # Would be negative in int64.
        ({"row_groups": np.broadcast_to(np.int64(2**40 - 1), 2**23)}, r"fewer than 2\*\*62 rows in total"),
        *[
            ({name: value}, f"{name} must be a whole number, got {value!r}")
            for name in ("num_shards", "batch_size", "epoch", "seed")
            for value in (1.0, "1", None)
        ],
        *[
            ({"row_groups": value}, "row_groups must be whole numbers in one dimension, got")
            for value in ([1.0, 2.0], ["1"], [None], [True, False], [[1, 2], [3, 4]], [2**70], 3)
        ],
        ({"row_groups": np.asarray([1.5])}, "row_groups must be whole numbers in one dimension, got"),
        (
            {"row_groups": np.asarray(["2020-01-01"], dtype="datetime64[D]")},
            "row_groups must be whole numbers",
        ),
    ],
)
def test_numbers_that_make_no_plan_are_refused(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        plan_of(**({"row_groups": [1]} | changes))


def test_a_step_out_of_range_is_refused() -> None:
    plan = plan_of([3], 2, 2)
    with pytest.raises(ValueError, match="step must be from 0 to 1"):
        plan.global_rows(2)


@pytest.mark.parametrize("make", [tuple, list, range, np.uint8, np.int32, np.uint64, np.int64])
def test_row_groups_may_be_any_sequence_of_whole_numbers(make: Any) -> None:
    sizes = range(0, 200, 7)
    row_groups = make(sizes) if make is not range else sizes
    plan = plan_of(row_groups, np.int32(3), np.int16(50), np.int64(1), seed=np.uint8(2))
    assert plan.row_groups.dtype == np.int64
    expected = plan_of(list(sizes), 3, 50, 1, seed=2)
    assert _digest(plan, 3) == _digest(expected, 3)


def test_a_plan_is_not_changed_by_the_callers_array() -> None:
    sizes = np.asarray([5, 6, 7])
    plan = plan_epoch(sizes, num_shards=1, batch_size=4, epoch=0, seed=0)
    sizes[:] = 100
    assert plan.row_groups.tolist() == [5, 6, 7]
    assert not plan.row_groups.flags.writeable
    sizes.setflags(write=False)
    shared = plan_epoch(sizes, num_shards=1, batch_size=4, epoch=0, seed=0)
    assert np.shares_memory(shared.row_groups, sizes)


def test_a_shards_plan_takes_three_numbers_a_row_group() -> None:
    sizes = np.full(200_000, 50)
    tracemalloc.start()
    try:
        plan = plan_epoch(sizes, num_shards=1024, batch_size=2048, epoch=0, seed=0)
        reads = plan.shard(500).reads()
        held, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert len(reads) == pytest.approx(200_000 / 48, rel=0.1)
    # Sizes, order and starts; the shard's own range is only a small part.
    assert held < 1.2 * 3 * 8 * len(sizes)
    assert peak < 1.2 * 4 * 8 * len(sizes)


def test_row_counts_beyond_32_bits_are_exact() -> None:
    sizes = [2**31 + 1, 2**39 + 7, 0, 2**40 - 1, 1, 2**33, 2**40 - 5]
    for shuffle, num_shards in itertools.product((True, False), (1, 5, 50)):
        plan = plan_of(sizes, num_shards, 2**20 + 3, shuffle=shuffle)
        assert plan.num_rows == sum(sizes) > 2**41
        assert plan.num_steps == -(-sum(sizes) // (2**20 + 3))
        last = plan.num_steps - 1
        assert plan.global_rows(last) == sum(sizes) - last * (2**20 + 3)
        assert plan.global_rows(last) == sum(plan.shard_rows(last, shard) for shard in range(num_shards))
        for start in (0, plan.num_steps // 3, last):
            found = [0] * len(sizes)
            for shard in range(num_shards):
                for read in plan.shard(shard).reads(start):
                    assert start <= read.first_step <= last
                    found[read.row_group] += sum(span.stop - span.start for span in read.slices)
            assert sum(found) == sum(sizes) - start * (2**20 + 3)
            assert found == sizes if start == 0 else all(map(int.__le__, found, sizes))


def test_rows_beyond_32_bits_are_found() -> None:
    num_shards, num_steps = 2**20, 2**13  # every shard has one row of every batch
    sizes = [7, num_shards * num_steps - 7]
    plan = plan_epoch(sizes, num_shards=num_shards, batch_size=num_shards, epoch=0, seed=0, shuffle=False)
    for shard in (7, 100, num_shards - 1):
        [read] = plan.shard(shard).reads()
        [rows] = plan.shard(shard).rows(read)
        assert read.row_group == 1
        assert rows.tolist() == [step * num_shards + shard - 7 for step in range(num_steps)]


# The first 16 digits of two SHA-256 hashes: the whole epoch, and the epoch from step 5. See `_digest`.
PINNED_ORDERS = {
    ("groups of 70", 1, True): "09f64811bb1c822e088f9fb7388a7596",
    ("groups of 70", 5, True): "03a46984f5d162528237ffd66e5c79ea",
    ("groups of 70", 64, True): "152a1db7a63aea71fb5a20bd9ff8e52f",
    ("groups of 70", 5, False): "c009ac2e5c7a477d31f67d6d50b40e8a",
    ("uneven groups", 1, True): "b97cbc9f6ca1e9c86bbe4a336e1726e7",
    ("uneven groups", 3, True): "d448056e1ebf33a86eb9e74b498b1af0",
    ("uneven groups", 100, True): "5200fe2e42b5b784b7f052087738164b",
    ("uneven groups", 3, False): "8926ac9d3749a2e5ce82a45b5e69bb5a",
    ("two groups", 7, True): "b94f9050f15f02d9f0f9ec155365802a",
}
PINNED_SIZES = {
    "groups of 70": [70] * 40,
    "uneven groups": [0, 900, 1, 0, 33, 250, 7, 7, 7, 0, 401, 64, 0],
    "two groups": [500, 11],
}


def _digest(plan: EpochPlan, start_step: int) -> str:
    """Hashes each shard's reads, their order, and the rows of every step."""
    digest = hashlib.sha256()
    for shard in range(plan.num_shards):
        for read in plan.shard(shard).reads(start_step):
            digest.update(f"{read.row_group} {read.first_step}".encode())
            digest.update("".join(f" {p.stream} {p.start} {p.stop}" for p in read.slices).encode())
        digest.update(str(shard_rows(plan, shard, start_step)).encode())
    return digest.hexdigest()[:16]


@pytest.mark.parametrize("case", PINNED_ORDERS)
def test_the_order_of_the_data_never_changes(case: tuple[str, int, bool]) -> None:
    # A checkpoint's data position is valid only while these hashes stay the same.
    sizes, num_shards, shuffle = case
    plan = plan_of(PINNED_SIZES[sizes], num_shards, 37, 3, seed=11, shuffle=shuffle)
    assert _digest(plan, 0) + _digest(plan, 5) == PINNED_ORDERS[case]
