"""The orders of pipeline schedules: complete, without deadlock, as idle and as hungry as the papers say."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ringspark.estimators.parallel.model.pipeline.actions import (
    Action,
    Arrival,
    Kind,
    Progress,
    receiver,
    with_arrivals,
)
from ringspark.estimators.parallel.model.pipeline.delayed import Backlog, late_by_depth, one_step_late
from ringspark.estimators.parallel.model.pipeline.schedules import SCHEDULES, schedule_of
from ringspark.estimators.parallel.model.pipeline.simulation import most_live, simulated
from ringspark.estimators.parallel.model.pipeline.timeline import bubble_share

FLUSHED = [name for name, schedule in SCHEDULES.items() if schedule.order is not None]


def _sizes(name: str) -> Iterator[tuple[int, int, int]]:
    """Yields ranks, stages a rank and micro-batches."""
    least, most = SCHEDULES[name].virtual
    for ranks in (1, 2, 3, 4):
        for virtual in range(least, min(most, 3) + 1):
            for micros in (1, 2, 3, 4, 5, 8, 9):
                yield ranks, virtual, micros


@pytest.mark.parametrize("name", FLUSHED)
def test_every_stage_takes_every_micro_batch_forward_and_back_once(name: str) -> None:
    for ranks, virtual, micros in _sizes(name):
        owners = SCHEDULES[name].owners(ranks, virtual)
        orders = SCHEDULES[name].orders_by_rank(ranks, virtual, micros)
        assert owners[-1] == 0  # where the mesh says that the losses are
        assert Counter(owners) == dict.fromkeys(range(ranks), virtual)
        for rank, order in enumerate(orders):
            assert all(owners[action.stage] == rank for action in order)
        found: dict[tuple[int, int], str] = {}
        for order in orders:
            for kind, stage, micro in order:
                found[stage, micro] = found.get((stage, micro), "") + kind.value
        assert set(found) == {(s, m) for s in range(ranks * virtual) for m in range(micros)}
        assert set(found.values()) <= {"FB", "FIW"}


@pytest.mark.parametrize("name", FLUSHED)
def test_what_is_sent_arrives_once_before_it_is_needed_and_in_one_order(name: str) -> None:
    for ranks, virtual, micros in _sizes(name):
        _check_arrivals(
            SCHEDULES[name].orders_by_rank(ranks, virtual, micros), SCHEDULES[name].owners(ranks, virtual)
        )


def _check_arrivals(orders: Any, owners: list[int]) -> None:
    steps = with_arrivals(orders, owners)
    for rank, own in enumerate(steps):
        assert [step for step in own if isinstance(step, Action)] == list(orders[rank])
    for one in range(len(steps)):
        for other in range(len(steps)):
            # What two ranks send and receive between each other, seen from both sides.
            assert _messages(steps[one], one, other, owners) == _messages(steps[other], one, other, owners)
    for rank, own in enumerate(steps):
        expected = set()
        for step in own:
            if isinstance(step, Arrival):
                expected.add((step.is_forward, step.stage, step.micro))
            elif step.kind is Kind.FORWARD and step.stage and owners[step.stage - 1] != rank:
                assert (True, step.stage, step.micro) in expected
            elif (
                step.kind in (Kind.BACKWARD, Kind.INPUT)
                and step.stage + 1 < len(owners)
                and owners[step.stage + 1] != rank
            ):
                assert (False, step.stage, step.micro) in expected


def _messages(steps: Any, one: int, other: int, owners: list[int]) -> list[tuple[int, bool, int, int]]:
    """Returns sender, direction, stage and micro-batch of what goes between two ranks, in one's order."""
    found = []
    for step in steps:
        if isinstance(step, Arrival):
            pair, message = {step.source, owners[step.stage]}, (step.source, step.is_forward, *step[1:3])
        else:
            target = receiver(step, len(owners))
            if target is None:
                continue
            sender = owners[step.stage]
            pair, message = {sender, owners[target]}, (sender, step.kind is Kind.FORWARD, target, step.micro)
        if pair == {one, other} and one != other:
            found.append(message)
    return found


@pytest.mark.parametrize(
    ("name", "virtual", "share"),
    [
        ("naive", 1, lambda p, v, m: (p - 1) / p),
        ("gpipe", 1, lambda p, v, m: (p - 1) / (m + p - 1)),
        ("1f1b", 1, lambda p, v, m: (p - 1) / (m + p - 1)),
        ("interleaved", 2, lambda p, v, m: (p - 1) / (v * m + p - 1)),
        ("interleaved", 3, lambda p, v, m: (p - 1) / (v * m + p - 1)),
        ("zero_bubble", 1, lambda p, v, m: (p - 1) / (3 * m + p - 1)),
        ("zero_bubble", 2, lambda p, v, m: (p - 1) / (3 * v * m + p - 1)),
        ("zbv", 2, lambda p, v, m: (p - 1) / (3 * v * m + p - 1)),
    ],
)
def test_the_ranks_wait_for_the_known_share_of_a_step(name: str, virtual: int, share: Any) -> None:
    for ranks in (2, 3, 4):
        for rounds in (2, 3, 4):
            micros = ranks * rounds
            orders = SCHEDULES[name].orders_by_rank(ranks, virtual, micros)
            found = bubble_share(simulated(orders, ranks * virtual))
            assert found == pytest.approx(share(ranks, virtual, micros))


def test_the_micro_batches_whose_activations_live() -> None:
    def live(name: str, virtual: int) -> list[int]:
        """By place along the pipeline."""
        return most_live(SCHEDULES[name].orders_by_rank(4, virtual, 8))[::-1]

    assert live("naive", 1) == [1, 1, 1, 1]
    assert live("gpipe", 1) == [8, 8, 8, 8]
    assert live("1f1b", 1) == [4, 3, 2, 1]
    assert live("interleaved", 2) == [11, 9, 7, 5]


def test_gpipe_and_1f1b_are_the_orders_of_torch() -> None:
    from torch.distributed.pipelining import schedules

    for name, kind in (("gpipe", schedules.ScheduleGPipe), ("1f1b", schedules.Schedule1F1B)):
        for ranks, micros in ((2, 2), (2, 5), (4, 4), (4, 9)):
            stage: Any = SimpleNamespace(num_stages=ranks, has_backward=True)
            theirs = kind(stage, micros).pipeline_order
            assert theirs is not None
            ours = SCHEDULES[name].orders_by_rank(ranks, 1, micros)[::-1]
            for rank in range(ranks):
                kinds = [action.computation_type.value for action in theirs[rank] if action is not None]
                # Kinds alone: torch numbers the forward passes of 1F1B's last stage from 1.
                assert [a.kind.value for a in ours[rank]] == [word for word in kinds if word in "FB"]


# ------------------------------------------------------------------------------ without a flush


@given(
    ranks=st.integers(1, 5),
    per_step=st.integers(1, 6),
    steps=st.lists(st.integers(0, 6), min_size=1, max_size=12),
    is_2bw=st.booleans(),
)
def test_late_gradients_are_complete_when_they_are_released(
    ranks: int, per_step: int, steps: list[int], is_2bw: bool
) -> None:
    delays = (one_step_late if is_2bw else late_by_depth)(ranks, per_step)
    backlog, owners = Backlog(delays), list(range(ranks))
    progress = Progress(ranks)
    made: list[list[Action]] = [[] for _ in range(ranks)]
    micros_of: dict[int, range] = {}
    released: list[list[int]] = [[] for _ in range(ranks)]
    counts = [min(count, per_step) for count in steps]
    number = 0
    while number < len(counts) or backlog.steps_left:
        is_drain = number >= len(counts)
        step = backlog.step(0 if is_drain else counts[number], is_drain=is_drain)
        assert step.number == number
        micros_of[number] = step.micros
        with_arrivals(step.orders, owners, progress)  # fails where the ranks would wait for each other
        progress.forget(step.finished)
        for stage in range(ranks):
            made[stage] += step.orders[stage]
            backs = {action.micro for action in made[stage] if action.kind is Kind.BACKWARD}
            if stage in step.released:
                assert step.released[stage] == number - delays[stage]
                assert set(micros_of[step.released[stage]]) <= backs
                released[stage].append(step.released[stage])
            # And no more is kept than the pipeline is deep.
            forwards = {action.micro for action in made[stage] if action.kind is Kind.FORWARD}
            assert len(forwards - backs) <= max(ranks - 1 - stage, 0)
        number += 1
    with_rows = [step for step, count in enumerate(counts) if count]
    for stage in range(ranks):
        assert released[stage] == with_rows
        pairs = Counter((kind, micro) for kind, _, micro in made[stage])
        assert pairs == {(k, m): 1 for k in (Kind.FORWARD, Kind.BACKWARD) for m in range(sum(counts))}


def test_without_a_flush_no_rank_waits_once_the_pipeline_is_full() -> None:
    for delays in (one_step_late(4, 4), late_by_depth(4, 4)):
        backlog = Backlog(delays)
        steps = [backlog.step(4) for _ in range(20)]
        orders = [[action for step in steps for action in step.orders[s]] for s in range(4)]
        # Only while it fills, of 80 micro-batches; with a flush after every 4 it is 3 / (4 + 3).
        assert bubble_share(simulated(orders, 4)) < 3 / 80


def test_how_late_each_stage_is() -> None:
    assert one_step_late(4, 8) == [1, 1, 1, 1]
    assert one_step_late(1, 8) == [0]
    assert late_by_depth(4, 1) == [3, 2, 1, 0]  # the paper's: each micro-batch is a step
    assert late_by_depth(4, 2) == [2, 1, 1, 0]
    assert late_by_depth(4, 8) == [1, 1, 1, 0]


@pytest.mark.parametrize(
    ("name", "virtual", "message"),
    [
        ("gpip", 1, "unknown pipeline schedule 'gpip'; did you mean 'gpipe'?"),
        ("1f1b", 2, "'1f1b' takes 1 stages a worker, got 2"),
        ("interleaved", 1, "'interleaved' takes 2 or more stages a worker, got 1"),
        ("zbv", 3, "'zbv' takes 2 stages a worker, got 3"),
    ],
)
def test_wrong_schedules_are_refused(name: str, virtual: int, message: str) -> None:
    with pytest.raises(ValueError, match=message.replace("?", r"\?")):
        schedule_of(name, virtual)
