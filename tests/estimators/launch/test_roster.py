"""Ordinary tasks that meet in the run's folder, and what the driver does while too few of them come."""

from __future__ import annotations

import threading
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from supervised_gang import run_gang

from ringspark.estimators import WorkerError
from ringspark.estimators.failures import LOST, Failure
from ringspark.estimators.launch import monitor as monitor_module
from ringspark.estimators.launch import shortage, taken
from ringspark.estimators.launch.devices import Claim
from ringspark.estimators.launch.heartbeat import Beat, Pulse
from ringspark.estimators.launch.monitor import NO_ROOM, Monitor
from ringspark.estimators.launch.owner import write_owner
from ringspark.estimators.launch.roster import Offer, Roster, RosterBuilder, await_roster
from ringspark.estimators.launch.shortage import Shortage, seconds_of


def _pulse(folder: Path, launch: int = 0) -> Pulse:
    write_owner(str(folder), "t", launch)
    return Pulse(run_uri=str(folder), token="t", launch=launch)


def _offer(task: int, attempt: int = 0) -> Offer:
    return Offer(task=task, attempt=attempt, claim=Claim(host="h"))


def test_the_ranks_are_the_newest_attempts_and_older_ones_wait_until_the_end(tmp_path: Path) -> None:
    pulse = _pulse(tmp_path)
    builder = RosterBuilder(pulse=pulse, num_tasks=2)
    with ThreadPoolExecutor(4) as pool:
        lost = pool.submit(await_roster, pulse, _offer(0))
        time.sleep(0.2)
        builder.look()
        assert builder.roster is None
        others = [pool.submit(await_roster, pulse, _offer(0, 1))]
        while _offer(0, 1) not in builder.offers:
            builder.look()
        others.append(pool.submit(await_roster, pulse, _offer(1)))
        while builder.roster is None:
            builder.look()
        expected = (_offer(0, 1), _offer(1))
        assert [other.result(5) for other in others] == [expected, expected]
        assert builder.find_replaced() == []
        # A copy that Spark starts later is no rank either.
        copy = pool.submit(await_roster, pulse, _offer(1, 1))
        while not builder.find_replaced():
            builder.look()
        assert [offer.task for offer in builder.find_replaced()] == [1]
        assert not lost.done()
        assert not copy.done()
        builder.dismiss()
        assert (lost.result(5), copy.result(5)) == ((), ())


def test_a_task_ends_when_another_launch_owns_the_run(tmp_path: Path) -> None:
    pulse = _pulse(tmp_path)
    with ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(await_roster, pulse, _offer(0))
        time.sleep(0.2)
        assert not waiting.done()
        write_owner(str(tmp_path), "t", 1)
        assert waiting.result(10) == ()


def _config(workers: int = 4, replica: int = 1) -> Any:
    return SimpleNamespace(num_workers=workers, workers_per_replica=replica, timeout_seconds=600.0)


def _found(tasks: int, silent: float, tmp_path: Path) -> RosterBuilder:
    """Returns a builder whose last offer came `silent` seconds ago."""
    builder = RosterBuilder(pulse=Pulse(run_uri=str(tmp_path), token="t"), num_tasks=4)
    builder._found = {str(task): _offer(task) for task in range(tasks)}
    builder.changed_at = time.monotonic() - silent
    return builder


@pytest.mark.parametrize(
    ("tasks", "launch", "least", "replica", "survivors", "silent", "ends"),
    [
        (3, 1, 2, 1, 0, 4.0, False),  # another executor may come soon
        (3, 1, 2, 1, 0, 6.0, True),  # continues with 3
        (3, 1, 2, 2, 0, 6.0, True),  # continues with 2
        (1, 1, 2, 1, 0, 6.0, False),
        (3, 1, 4, 1, 0, 6.0, False),  # needs all 4
        (3, 0, 2, 1, 0, 6.0, False),  # the first launch has numWorkers
        (3, 0, 4, 1, 0, 500.0, True),  # gives way
        (3, 1, 2, 1, 3, 1.5, True),  # all that were not lost have come back
        (2, 1, 2, 1, 3, 1.5, False),  # another one will come back
    ],
)
def test_a_gang_continues_with_fewer_only_after_a_loss(
    tmp_path: Path,
    tasks: int,
    launch: int,
    least: int,
    replica: int,
    survivors: int,
    silent: float,
    ends: bool,
) -> None:
    waits = Shortage(SimpleNamespace(), {}, least, survivors=survivors)
    found = waits.find(_found(tasks, silent, tmp_path), _config(replica=replica), launch)
    assert (found is not None) is ends


def test_a_launch_long_after_the_first_has_the_whole_patience(tmp_path: Path) -> None:
    waits, met = Shortage(SimpleNamespace(), {}, 4), _found(4, 0.0, tmp_path)
    waits._since = time.monotonic() - 10_000.0
    met.roster = Roster(offers=tuple(met.offers))
    assert waits.find(met, _config(), 0) is None
    assert waits.find(_found(1, 60.0, tmp_path), _config(), 1) is None


def test_a_lost_row_of_a_rank_that_has_ended_is_noticed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    builder = _found(4, 0.0, tmp_path)
    builder.roster = Roster(offers=tuple(builder.offers))
    monitor = Monitor(builder.pulse, 4, Any, lambda: 4, builder)
    beats = [
        Beat(token="t", rank=k, host="h", task=k, pid=k, launch=0, phase="p", ticks=1, beats=1, ended=k < 3)
        for k in range(4)
    ]
    monitor._hang_detector.update(beats, time.monotonic())
    builder._found["again"] = _offer(2, 1)
    monkeypatch.setattr(monitor_module, "_LAST_ROW_SECONDS", 0.01)
    assert monitor._find_replaced(builder) is None  # rank 3 still works
    monitor._hang_detector.update([replace(beats[3], ended=True)], time.monotonic())
    time.sleep(0.05)
    failure = monitor._find_replaced(builder)
    assert failure is not None
    assert (failure.rank, failure.type) == (2, LOST)


@pytest.mark.parametrize("may_copy", [False, True])
def test_a_new_attempt_is_a_loss_at_once_without_speculation(tmp_path: Path, may_copy: bool) -> None:
    builder = _found(2, 0.0, tmp_path)
    builder.roster, builder.may_copy = Roster(offers=tuple(builder.offers)), may_copy
    monitor = Monitor(builder.pulse, 2, Any, lambda: 2, builder)
    beats = [
        Beat(token="t", rank=k, host="h", task=k, pid=k, launch=0, phase="p", ticks=1, beats=1)
        for k in range(2)
    ]
    monitor._hang_detector.update(beats, time.monotonic())
    builder._found["again"] = _offer(1, 1)
    assert (monitor._find_replaced(builder) is None) is may_copy


def test_a_gang_that_gives_way_tries_again_and_ends_in_one_sentence(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pauses: list[float] = []
    monkeypatch.setattr(shortage.time, "sleep", pauses.append)
    monkeypatch.setattr(shortage, "is_remote", lambda _: True)
    monkeypatch.setattr(shortage.random, "uniform", lambda least, most: least)
    waits = Shortage(SimpleNamespace(), {"spark.dynamicAllocation.executorIdleTimeout": "5s"}, 4)
    config, cause = _config(), Failure.lost(0, "unknown", "starting", "3 of 4", NO_ROOM)
    assert waits.find(_found(3, 500.0, tmp_path), config, 0)
    assert waits.solve(cause, config, 3, 0) is config
    # Longer than an idle executor lives, so that others can get it.
    assert 10.0 <= pauses[0] <= 30.0
    # It waits longer than the 20 seconds before.
    assert waits.find(_found(3, 39.0, tmp_path), config, 0) is None
    waits._since = time.monotonic() - 700.0
    with pytest.raises(RuntimeError, match=r"started 3 of the 4 workers within 600 s; lower numWorkers"):
        waits.solve(cause, config, 3, 0)


@pytest.mark.parametrize(
    ("text", "seconds"), [("60s", 60), ("2min", 120), ("500ms", 0.5), ("7", 7), ("1h", 3600)]
)
def test_times_of_sparks_conf(text: str, seconds: float) -> None:
    assert seconds_of(text) == seconds


@pytest.mark.parametrize(
    ("reason", "is_taken"),
    [
        ("Executor decommission: Worker was decommissioned", True),
        ("worker lost: 127.0.0.1:3 got disassociated", True),
        (
            "ExecutorLostFailure (executor 1 exited unrelated to the running tasks) Reason: preempted",
            True,
        ),
        ("Command exited with code 137", True),
        ("Command exited with code 0", True),
        ("Command exited with code 143", True),
        ("Command exited with code 52", False),
        ("exited with exit code 137(SIGKILL, possible container OOM)", False),
        ("Container killed by YARN for exceeding physical memory limits", False),
        ("Python worker exited unexpectedly (crashed)", False),
        ("the worker has sent no heartbeat for 20 s (timeoutSeconds=20)", False),
    ],
)
def test_what_the_cluster_takes_away_is_told_from_what_ends_by_itself(reason: str, is_taken: bool) -> None:
    assert taken.is_taken(reason) is is_taken


def _sum_of_ranks(collective: Any, device: str, status: Any) -> str:
    import torch

    total = collective.all_reduce(torch.tensor([float(collective.rank)]))
    return f"{collective.rank} of {collective.size}: {total.item()}"


@pytest.mark.spark
@pytest.mark.modes
def test_a_gang_of_ordinary_tasks_runs_again_and_again(spark: Any) -> None:
    for _ in range(2):
        assert run_gang(spark, 2, "torch", _sum_of_ranks, launch="tasks") == ["0 of 2: 1.0", "1 of 2: 1.0"]


def _fails(collective: Any, device: str, status: Any) -> str:
    if collective.rank == 1:
        raise ZeroDivisionError("on purpose")
    return _sum_of_ranks(collective, device, status)


@pytest.mark.spark
def test_an_error_of_an_ordinary_task_is_the_users_error(spark: Any) -> None:
    with pytest.raises(WorkerError, match=r"rank 1 .* ZeroDivisionError: on purpose"):
        run_gang(spark, 2, "torch", _fails, launch="tasks")


@pytest.mark.spark
def test_two_gangs_that_each_hold_half_of_the_slots_both_finish(
    spark: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The other application's tasks are imitated by a job that holds slots for a while."""
    monkeypatch.setattr(Shortage, "_draw", lambda self: setattr(self, "_patience", 1.0))
    monkeypatch.setattr(Shortage, "__post_init__", lambda self: (setattr(self, "_idle", -4.9), self._draw()))
    held = threading.Event()

    def hold(batches: Any) -> Any:
        time.sleep(4.0)
        yield from batches

    def other() -> None:
        held.set()
        with suppress(Exception):
            spark.range(0, 3, 1, 3).mapInArrow(hold, "id long").collect()

    thread = threading.Thread(target=other)
    thread.start()
    held.wait(5)
    time.sleep(1.0)
    try:
        assert len(run_gang(spark, 2, "torch", _sum_of_ranks, launch="tasks")) == 2
    finally:
        thread.join()


def test_an_offer_survives_its_file() -> None:
    offer = replace(
        _offer(3, 2), problem="no GPU", claim=Claim(host="h", addresses=("0",), visible=("a", "b"))
    )
    assert Offer.from_json(offer.to_json()) == offer
