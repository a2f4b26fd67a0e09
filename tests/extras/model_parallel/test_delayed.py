"""Schedules without a flush: complete gradients, a full pipeline, and the delay of each stage."""

from collections import Counter

from hypothesis import given
from hypothesis import strategies as st
from simulation import bubble_share, simulate

from ringspark.extras.model_parallel.pipeline.actions import Action, CompletedActions, PassType, with_arrivals
from ringspark.extras.model_parallel.pipeline.delayed import Backlog, late_by_depth, one_step_late


@given(
    ranks=st.integers(1, 5),
    per_step=st.integers(1, 6),
    steps=st.lists(st.integers(0, 6), min_size=1, max_size=12),
    is_2bw=st.booleans(),
)
def test_late_gradients_are_complete(ranks: int, per_step: int, steps: list[int], is_2bw: bool) -> None:
    delays = (one_step_late if is_2bw else late_by_depth)(ranks, per_step)
    backlog, owners = Backlog(delays), list(range(ranks))
    progress = CompletedActions(ranks)
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
        with_arrivals(step.orders, owners, progress)  # fails on a deadlock
        progress.forget(step.finished)
        for stage in range(ranks):
            made[stage] += step.orders[stage]
            backs = {action.micro for action in made[stage] if action.kind is PassType.BACKWARD}
            if stage in step.released:
                assert step.released[stage] == number - delays[stage]
                assert set(micros_of[step.released[stage]]) <= backs
                released[stage].append(step.released[stage])
            # The number of live micro-batches is at most the depth of the pipeline.
            forwards = {action.micro for action in made[stage] if action.kind is PassType.FORWARD}
            assert len(forwards - backs) <= max(ranks - 1 - stage, 0)
        number += 1
    with_rows = [step for step, count in enumerate(counts) if count]
    for stage in range(ranks):
        assert released[stage] == with_rows
        pairs = Counter((kind, micro) for kind, _, micro in made[stage])
        assert pairs == {(k, m): 1 for k in (PassType.FORWARD, PassType.BACKWARD) for m in range(sum(counts))}


def test_without_a_flush_no_rank_waits_once_the_pipeline_is_full() -> None:
    for delays in (one_step_late(4, 4), late_by_depth(4, 4)):
        backlog = Backlog(delays)
        steps = [backlog.step(4) for _ in range(20)]
        orders = [[action for step in steps for action in step.orders[s]] for s in range(4)]
        # Ranks are idle only at the start, for 80 micro-batches. With a flush after every 4 it is 3 / (4 +
        # 3).
        assert bubble_share(simulate(orders, 4)) < 3 / 80


def test_how_late_each_stage_is() -> None:
    assert one_step_late(4, 8) == [1, 1, 1, 1]
    assert one_step_late(1, 8) == [0]
    assert late_by_depth(4, 1) == [3, 2, 1, 0]  # the paper's: each micro-batch is a step
    assert late_by_depth(4, 2) == [2, 1, 1, 0]
    assert late_by_depth(4, 8) == [1, 1, 1, 0]
