"""Checkpoints are due by steps, epochs and seconds; ranks rarely read the clock."""

from typing import Any

import pytest
import torch

from ringspark.estimators.collectives.local_collective import LocalCollective
from ringspark.estimators.collectives.traffic import Member
from ringspark.estimators.parallel.mesh import RankMesh
from ringspark.estimators.training.checkpoint.resume import CheckpointSchedule, choose_interval
from ringspark.estimators.training.settings.config import TrainConfig


class Rank(LocalCollective):
    """Counts broadcasts; with `answers`, it is the second of two ranks, and rank 0 broadcasts those."""

    def __init__(self, *answers: int) -> None:
        super().__init__()
        self.broadcasts, self.answers = 0, list(answers)
        if answers:
            self.member = Member(rank=1, size=2)

    def broadcast(self, tensors: list[torch.Tensor], root: int = 0) -> None:
        self.broadcasts += 1
        if self.answers:
            tensors[0].fill_(self.answers.pop(0))


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


def _due(collective: LocalCollective, clock: Clock, **settings: Any) -> CheckpointSchedule:
    asked = {"checkpoint_every_seconds": 0.0} | settings
    config = TrainConfig(shards_uri="/s", run_uri="/r", input_columns=("x",), label_columns=("y",), **asked)
    return CheckpointSchedule(config, RankMesh.of(collective), clock)


def test_steps_and_epochs_need_nobody_elses_word() -> None:
    collective = Rank()
    due = _due(collective, Clock(), checkpoint_every_steps=4, checkpoint_every_epochs=2)
    assert [step for step in range(1, 13) if due.is_due_after_step(step)] == [4, 8, 12]
    assert [epoch for epoch in range(1, 7) if due.is_due_after_epoch(epoch)] == [2, 4, 6]
    assert collective.broadcasts == 0


def test_without_a_wish_nothing_is_ever_due() -> None:
    due = _due(Rank(), Clock())
    assert not due.is_enabled
    assert not any(due.is_due_after_step(step) or due.is_due_after_epoch(step) for step in range(1, 50))


@pytest.mark.parametrize("pace", [0.001, 0.1, 7.0, 1000.0])
def test_seconds_are_kept_within_a_tenth_or_a_step(pace: float) -> None:
    """Steps take `pace` seconds; the first step takes ten times as long."""
    collective, clock = Rank(), Clock()
    due = _due(collective, clock, checkpoint_every_seconds=60.0)
    written = [0.0]
    steps = 0
    while len(written) < 4:
        steps += 1
        clock.now += pace if steps > 1 else 10 * pace
        if due.is_due_after_step(steps):
            assert 60.0 <= clock.now - written[-1] <= max(66.0, 60.0 + 10 * pace)
            written.append(clock.now)
            due.restart(steps)
    assert collective.broadcasts <= min(steps, 120)


def test_the_clock_of_rank_0_decides_for_all() -> None:
    clock = Clock()
    # Rank 0 broadcasts "not yet" twice and then "now".
    due = _due(Rank(1, 1, 0), clock, checkpoint_every_seconds=60.0)
    clock.now = 1e6
    assert [due.is_due_after_step(step) for step in (1, 2, 3)] == [False, False, True]


@pytest.mark.parametrize("wait", [1e-4, 0.03, 0.5, 20.0])
def test_the_interval_balances_waits_against_lost_steps(wait: float) -> None:
    """Young's interval, unless it is below 15 s or steps would wait more than 1 % of the time."""
    best = (2 * wait * 3600.0) ** 0.5
    assert choose_interval(wait) == pytest.approx(max(15.0, best, 100 * wait))
    assert wait / choose_interval(wait) <= 0.01 + 1e-12


def test_all_ranks_end_at_the_checkpoint_that_the_driver_asks_for() -> None:
    first, other = (
        _due(Rank(), Clock(), checkpoint_every_seconds=60.0),
        _due(Rank(1, -1), Clock(), checkpoint_every_seconds=60.0),
    )
    assert not first.is_due_after_step(1)
    first._status.must_regroup = True
    assert [first.is_due_after_step(step) for step in (2, 3)] == [False, True]
    assert first.must_regroup
    assert [other.is_due_after_step(step) for step in (1, 2)] == [False, True]
    assert other.must_regroup
    # A checkpoint that was not written ends nothing.
    first.put_off()
    first.restart(3)
    assert not first.must_regroup
    assert not first.is_due_after_step(4)
    assert not first.must_regroup


def test_a_run_that_keeps_every_checkpoint_writes_few() -> None:
    kept = {"certify": True, "checkpoint_every_seconds": None}
    assert _due(Rank(), Clock(), **kept)._interval == 600.0
    assert _due(Rank(), Clock(), checkpoint_every_seconds=None)._interval == 15.0
