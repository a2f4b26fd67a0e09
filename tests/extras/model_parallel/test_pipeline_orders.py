"""Pipeline schedules are complete, free of deadlocks, and as idle and memory-hungry as published."""

from collections import Counter
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
from simulation import bubble_share, count_live, simulate

from ringspark.extras.model_parallel.pipeline import actions
from ringspark.extras.model_parallel.pipeline.schedules import SCHEDULES, schedule_of

FLUSHED = [name for name, schedule in SCHEDULES.items() if schedule.order is not None]


def _sizes(name: str) -> Iterator[tuple[int, int, int]]:
    """Yields ranks, stages per rank, and micro-batches."""
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
        assert owners[-1] == 0  # the mesh expects the losses here
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
        schedule = SCHEDULES[name]
        _check_arrivals(schedule.orders_by_rank(ranks, virtual, micros), schedule.owners(ranks, virtual))


def _check_arrivals(orders: Any, owners: list[int]) -> None:
    steps = actions.with_arrivals(orders, owners)
    for rank, own in enumerate(steps):
        assert [step for step in own if isinstance(step, actions.Action)] == list(orders[rank])
    for one in range(len(steps)):
        for other in range(len(steps)):
            # Both ranks list the same messages between them.
            assert _messages(steps[one], one, other, owners) == _messages(steps[other], one, other, owners)
    for rank, own in enumerate(steps):
        expected = set()
        for step in own:
            if isinstance(step, actions.Arrival):
                expected.add((step.is_forward, step.stage, step.micro))
            elif step.kind is actions.PassType.FORWARD and step.stage and owners[step.stage - 1] != rank:
                assert (True, step.stage, step.micro) in expected
            elif (
                step.kind in (actions.PassType.BACKWARD, actions.PassType.INPUT)
                and step.stage + 1 < len(owners)
                and owners[step.stage + 1] != rank
            ):
                assert (False, step.stage, step.micro) in expected


def _messages(steps: Any, one: int, other: int, owners: list[int]) -> list[tuple[int, bool, int, int]]:
    """Returns (sender, direction, stage, micro-batch) of the messages between two ranks, in order."""
    found = []
    for step in steps:
        if isinstance(step, actions.Arrival):
            pair, message = {step.source, owners[step.stage]}, (step.source, step.is_forward, *step[1:3])
        else:
            target = actions.receiver(step, len(owners))
            if target is None:
                continue
            sender, is_forward = owners[step.stage], step.kind is actions.PassType.FORWARD
            pair, message = {sender, owners[target]}, (sender, is_forward, target, step.micro)
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
            found = bubble_share(simulate(orders, ranks * virtual))
            assert found == pytest.approx(share(ranks, virtual, micros))


def test_the_micro_batches_whose_activations_live() -> None:
    def live(name: str, virtual: int) -> list[int]:
        """Returns live micro-batches, in pipeline order."""
        return count_live(SCHEDULES[name].orders_by_rank(4, virtual, 8))[::-1]

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
            ours = SCHEDULES[name].orders_by_rank(ranks, 1, micros)[::-1]
            for rank in range(ranks):
                kinds = [action.computation_type.value for action in theirs[rank] if action is not None]
                # Compare only the action types: torch numbers the forward passes of 1F1B's last stage from 1.
                assert [a.kind.value for a in ours[rank]] == [word for word in kinds if word in "FB"]


@pytest.mark.parametrize(
    ("name", "virtual", "message"),
    [
        ("1f1b", 2, "'1f1b' needs 1 stages per worker, got virtual=2"),
        ("interleaved", 1, "'interleaved' needs 2 or more stages per worker, got virtual=1"),
        ("zbv", 3, "'zbv' needs 2 stages per worker, got virtual=3"),
    ],
)
def test_wrong_schedules_are_refused(name: str, virtual: int, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        schedule_of(name, virtual)
