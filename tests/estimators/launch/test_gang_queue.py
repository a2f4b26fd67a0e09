"""Gangs that start at the same time: the order of the queue, and real gangs on Spark."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from threading import Barrier, Event
from typing import Any

import pytest
import torch
from supervised_gang import run_gang
from waiting import wait_for

from ringspark.estimators.collectives import Collective
from ringspark.estimators.launch.gang import GangQueue
from ringspark.estimators.launch.slots import count_slots
from ringspark.estimators.training.phase import Status


def _until(condition: Callable[[], bool]) -> None:
    # Bounded, so a broken queue fails the test and does not hang it.
    wait_for("the queue", condition, seconds=60)


def test_gangs_run_in_order_of_arrival_also_where_a_later_one_would_fit():
    queue, done = GangQueue(), [Event() for _ in range(3)]
    order: list[int] = []

    def gang(number: int, num_workers: int) -> None:
        with queue.turn(num_workers, lambda: 4):
            order.append(number)
            done[number].wait()

    with ThreadPoolExecutor(3) as threads:
        try:
            futures = [threads.submit(gang, 0, 3)]
            _until(lambda: order == [0])
            # The wide gang arrives first, so the narrow gang waits although a slot is free.
            for number, num_workers in ((1, 4), (2, 1)):
                futures.append(threads.submit(gang, number, num_workers))
                _until(lambda number=number: queue.num_waiting == number)
            assert order == [0]
            done[0].set()
            _until(lambda: order == [0, 1])
            assert queue.num_waiting == 1
            done[1].set()
            _until(lambda: order == [0, 1, 2])
        finally:
            for event in done:
                event.set()
        for future in futures:
            future.result()


def test_gangs_that_fit_together_run_together():
    queue, both = GangQueue(), Barrier(2, timeout=60)  # raises if one gang waits for the other

    def gang() -> None:
        with queue.turn(2, lambda: 4):
            both.wait()

    with ThreadPoolExecutor(2) as threads:
        for future in [threads.submit(gang) for _ in range(2)]:
            future.result()


@pytest.mark.parametrize("error", [ValueError, KeyboardInterrupt])
def test_a_gang_that_fails_or_is_interrupted_gives_its_slots_back(error):
    queue = GangQueue()

    def interrupted() -> int:
        raise error

    def fails_after_another() -> None:
        with queue.turn(4, lambda: 4):
            # This gang waited for slots and was interrupted before its turn.
            with pytest.raises(error), queue.turn(4, interrupted):
                raise AssertionError("must not run")
            assert queue.num_waiting == 0
            raise error

    with pytest.raises(error):
        fails_after_another()
    with queue.turn(4, lambda: 4):
        assert queue.num_waiting == 0


def test_without_devices_of_its_own_a_gang_runs_alone_and_with_unknown_slots_it_does_not_wait():
    queue = GangQueue()
    order: list[str] = []

    def gang() -> None:
        with queue.turn(1, lambda: 0):
            order.append("second")

    with ThreadPoolExecutor(1) as threads:
        with queue.turn(1, lambda: 0):
            order.append("first")
            second = threads.submit(gang)
            _until(lambda: queue.num_waiting == 1)
            assert order == ["first"]
        second.result()
    assert order == ["first", "second"]
    with queue.turn(8, lambda: None), queue.turn(8, lambda: None):
        assert queue.num_waiting == 0


def test_an_interrupt_of_the_main_thread_ends_the_wait():
    queue = GangQueue()
    main = threading.main_thread().ident

    def interrupt() -> None:
        _until(lambda: queue.num_waiting == 1)
        signal.pthread_kill(main, signal.SIGINT)

    with ThreadPoolExecutor(1) as threads, queue.turn(4, lambda: 4):
        sender = threads.submit(interrupt)
        with pytest.raises(KeyboardInterrupt), queue.turn(4, lambda: 4):
            raise AssertionError("must not run")
        sender.result()
        assert queue.num_waiting == 0


def _sum(collective: Collective, device: str, status: Status) -> str:
    total = collective.all_reduce(torch.tensor([float(collective.rank)]))
    return f"{collective.rank}: {total.item()}"


def _expected(num_workers: int) -> list[str]:
    total = float(sum(range(num_workers)))
    return [f"{rank}: {total}" for rank in range(num_workers)]


@pytest.mark.spark
@pytest.mark.modes
@pytest.mark.parametrize("num_gangs", [2, 4])
def test_gangs_that_do_not_fit_together_all_finish(spark, num_gangs):
    slots = count_slots(spark)
    # No two gangs fit into the slots at once.
    num_workers = max(2, slots - 1)
    names = [("horovod", "torch")[number % 2] for number in range(num_gangs)]
    with ThreadPoolExecutor(num_gangs) as threads:
        futures = [threads.submit(run_gang, spark, num_workers, name, _sum) for name in names]
        assert [future.result() for future in futures] == [_expected(num_workers)] * num_gangs


def _hold(folder: str) -> Any:
    """A job whose tasks keep their slots until the file "go" exists."""

    def tasks(batches: Any) -> Any:
        from pyspark import TaskContext

        context = TaskContext.get()
        Path(folder, f"held-{context.partitionId()}").touch()
        while not os.path.exists(os.path.join(folder, "go")):
            time.sleep(0.02)
        yield from batches

    return tasks


@pytest.mark.spark
@pytest.mark.modes
def test_a_gang_waits_for_the_slots_of_another_job_and_then_runs(spark, tmp_path):
    slots = count_slots(spark)
    num_workers = max(2, slots - 1)
    num_held = slots - num_workers + 1
    folder = str(tmp_path)

    def work(collective: Collective, device: str, status: Status) -> str:
        # This could happen before "go" only if a gang started with too few ranks.
        assert os.path.exists(os.path.join(folder, "go"))
        return _sum(collective, device, status)

    frame = spark.range(0, num_held, 1, num_held).mapInArrow(_hold(folder), "id long")
    with ThreadPoolExecutor(2) as threads:
        other = threads.submit(frame.count)
        try:
            _until(lambda: len(list(tmp_path.glob("held-*"))) == num_held)
            gang = threads.submit(run_gang, spark, num_workers, "torch", work)
            # Gives the gang time to try to start. Nothing is asserted about the wait.
            time.sleep(1.0)
        finally:
            (tmp_path / "go").touch()
        assert gang.result() == _expected(num_workers)
        assert other.result() == num_held
