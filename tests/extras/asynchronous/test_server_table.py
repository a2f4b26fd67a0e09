"""A server in one process has bounded clocks, shows workers their own writes, and counts completed steps."""

import threading
import time
from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from ringspark.estimators.options.sync import ParameterServer
from ringspark.extras.asynchronous.table import Clocks, ParameterTable, WorkerLeftError

MakeOptimizer = Callable[[list[nn.Parameter]], torch.optim.Optimizer]


def _sgd(parameters: list[nn.Parameter]) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=1.0)


def _table(
    size: int,
    bound: int | None,
    make: MakeOptimizer = _sgd,
    start: Any = None,
    seconds: float = 20,
    **how: Any,
) -> ParameterTable:
    held = nn.Parameter(torch.zeros(size, dtype=torch.double) if start is None else start.clone())
    return ParameterTable({0: held}, make([held]), size, ParameterServer(staleness=bound, **how), seconds)


RATE = [{"lr": 1.0}]


def _mark(worker: int, size: int) -> torch.Tensor:
    """Returns a gradient that counts the worker's pushes. Each push adds 1 to the worker's weight."""
    gradient = torch.zeros(size, dtype=torch.double)
    gradient[worker] = -1.0
    return gradient


@given(data=st.data(), size=st.integers(1, 4), bound=st.none() | st.integers(0, 4))
def test_no_order_of_workers_breaks_a_promise(data: st.DataObject, size: int, bound: int | None) -> None:
    """Workers read, push and read. The next worker is random, and the weights count what a reader sees."""
    table = _table(size, bound)
    in_step = bound == 0
    let_through = [0] * size  # the clock at which each worker last continued
    has_read = [True] * size
    for _ in range(data.draw(st.integers(1, 60))):
        able = [
            w for w in range(size) if not has_read[w] and table.clocks.may_read(table.clocks.pushed[w], bound)
        ]
        able += [w for w in range(size) if has_read[w]]
        assert able, "no worker may continue"
        worker = data.draw(st.sampled_from(able))
        if has_read[worker]:
            gradient = _mark(worker, size) * (1 if in_step else size)  # the rate cancels out in step
            table.push(worker, {0: gradient}, RATE, ends_step=True)
            has_read[worker] = False
            continue
        clock = table.clocks.pushed[worker]
        (seen,) = table.pull(worker, None, clock, bound)
        has_read[worker], let_through[worker] = True, clock
        assert seen[worker] == clock  # it reads its own writes
        if bound is not None:
            assert max(let_through) - table.clocks.slowest <= bound
            assert all(seen >= clock - bound)  # every update of clocks 0 to c - s - 1
            if in_step:
                assert all(seen == clock)


@given(
    pushed=st.lists(st.integers(0, 9), min_size=1, max_size=4),
    clock=st.integers(0, 9),
    bound=st.integers(0, 5),
)
def test_who_is_behind_is_who_keeps_a_reader_waiting(pushed: list[int], clock: int, bound: int) -> None:
    clocks = Clocks(len(pushed))
    clocks.pushed = pushed
    assert clocks.may_read(clock, bound) == (not clocks.behind(clock - bound))


def _adam(parameters: list[nn.Parameter]) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, lr=0.1, weight_decay=0.1)


@given(data=st.data())
def test_staleness_0_is_one_sum_a_step_bitwise_whatever_the_order_of_arrival(data: st.DataObject) -> None:
    size, steps = 3, 4
    start = torch.linspace(-1, 1, 5)
    generator = torch.Generator().manual_seed(0)
    gradients = torch.randn(steps, size, 5, generator=generator)
    plain = nn.Parameter(start.clone())
    optimizer = _adam([plain])
    table = _table(size, 0, make=_adam, start=start)
    for step in range(steps):
        rate = 0.1 / (step + 1)
        plain.grad = (gradients[step, 0] + gradients[step, 1]) + gradients[step, 2]
        optimizer.param_groups[0]["lr"] = rate
        optimizer.step()
        for worker in data.draw(st.permutations(range(size))):
            table.push(worker, {0: gradients[step, worker]}, [{"lr": rate}], ends_step=True)
        (seen,) = table.pull(0, None, step + 1, 0)
        assert torch.equal(seen, plain.detach())


@pytest.mark.parametrize("make", [_sgd, _adam])
def test_asynchronous_workers_in_turn_are_one_process_that_applies_gradients_late(make: Any) -> None:
    """Delayed SGD: with N round-robin workers, each gradient belongs to the weights N - 1 updates before."""
    size, updates = 3, 30
    matrix = torch.diag(torch.tensor([1.0, 0.3, 0.05]))
    start = torch.ones(3)
    table = _table(size, None, make=make, start=start)
    seen = [start.clone() for _ in range(size)]
    clocks = [0] * size
    plain = nn.Parameter(start.clone())
    optimizer = make([plain])
    rate = 0.2
    optimizer.param_groups[0]["lr"] = rate / size
    past = [start.clone()] * size
    for number in range(updates):
        worker = number % size
        table.push(worker, {0: matrix @ seen[worker]}, [{"lr": rate}], ends_step=True)
        clocks[worker] += 1
        (seen[worker],) = table.pull(worker, None, clocks[worker], None)
        plain.grad = matrix @ past[-size]
        optimizer.step()
        past.append(plain.detach().clone())
        assert torch.equal(seen[worker], past[-1])
    # All workers have the initial weights, so the first pushes apply to these.
    assert table.staleness == {size - 1: updates - size + 1} | dict.fromkeys(range(size - 1), 1)


def test_a_late_gradient_moves_less_by_its_staleness() -> None:
    """Worker 1 reads, worker 0 pushes 6 steps, then worker 1 pushes with a staleness of 6."""
    moved = []
    for corrects in (False, True):
        table = _table(2, None, correction="staleness" if corrects else "none")
        for clock in range(6):
            table.push(0, {0: _mark(0, 2)}, RATE, ends_step=True)
            table.pull(0, None, clock + 1, None)
        table.push(1, {0: _mark(1, 2)}, RATE, ends_step=True)
        moved.append(table.pull(1, None, 1, None)[0].tolist())
    assert moved == [[3.0, 0.5], [3.0, pytest.approx(0.5 / 6)]]


def test_several_pushes_of_one_step_are_one() -> None:
    """As by `push(index, gradient)`: parameters of one step may come separately, and one may come twice."""
    table = _table(2, 0)
    for ends_step in (False, True):
        table.push(0, {0: torch.tensor([1.0, 0.0], dtype=torch.double)}, RATE, ends_step=ends_step)
    table.push(1, {}, RATE, ends_step=True)
    assert table.pull(0, [0], 1, 0)[0].tolist() == [-2.0, 0.0]


def test_a_worker_that_leaves_ends_the_wait_for_it() -> None:
    table = _table(3, 1)
    for _ in range(2):
        table.push(0, {}, RATE, ends_step=True)
    errors: list[str] = []

    def read() -> None:
        with pytest.raises(WorkerLeftError) as caught:
            table.pull(0, None, 2, 1)
        errors.append(str(caught.value))

    reader = threading.Thread(target=read)
    reader.start()
    table.push(1, {}, RATE, ends_step=True)
    table.leave(2)
    reader.join(20)
    assert errors == ["rank 2 left the training after its step 0"]


def test_who_takes_no_step_is_named_after_the_timeout_and_who_does_is_waited_for() -> None:
    table = _table(2, 0, seconds=1.0)
    for _ in range(4):
        table.push(0, {}, RATE, ends_step=True)
    seen: list[int] = []
    goes_on = threading.Semaphore(0)

    def walk() -> None:
        """Takes the next step when the reader has noticed the previous one; three in all."""
        for _ in range(3):
            goes_on.acquire()
            table.push(1, {}, RATE, ends_step=True)

    def progress() -> None:
        seen.append(table.clocks.pushed[1])
        goes_on.release()

    def begin() -> None:
        while not table._changed._waiters:  # type: ignore[attr-defined]
            time.sleep(0.001)
        goes_on.release()

    threads = [threading.Thread(target=target, daemon=True) for target in (walk, begin)]
    for thread in threads:
        thread.start()
    told = "rank 1 has taken no step for 1 s after its step 3, and other workers wait for its step 4"
    with pytest.raises(WorkerLeftError, match=told):
        table.pull(0, None, 4, 0, progress)
    assert seen == [1, 2, 3]


def test_a_reader_whose_messages_are_not_read_keeps_nobody_waiting() -> None:
    """The reader gets a message per step, as over a full connection. Others push and read meanwhile."""
    table = _table(3, None)
    is_full, drains = threading.Event(), threading.Event()

    def progress() -> None:
        is_full.set()
        drains.wait(60)

    reader = threading.Thread(target=table.pull, args=(0, None, 2, 0, progress))
    reader.start()
    try:
        table.push(1, {}, RATE, ends_step=True)
        assert is_full.wait(60)

        def go_on() -> None:
            table.push(2, {}, RATE, ends_step=True)
            table.pull(2, None, 1, None)

        others = threading.Thread(target=go_on, daemon=True)
        others.start()
        others.join(10)
        assert not others.is_alive()
    finally:
        drains.set()
        for worker in (0, 0, 1, 2):
            table.push(worker, {}, RATE, ends_step=True)
        reader.join(60)
    assert not reader.is_alive()
