"""One server's shard of the parameters, its optimizer, and the workers' clocks. Thread-safe.

With a staleness bound of 0, the pushes of all workers are summed in rank order and applied as one step. This
is bitwise equal to training with the sum of the gradients. With another bound, each push is applied as a step
of its own when it arrives. A push then holds the mean gradient of the worker's rows, and the learning rate is
divided by the number of workers.

The learning rate of a late gradient may also be divided by its staleness: the number of steps that other
workers have taken since the worker's last read (Zhang et al. 2016, "Staleness-aware Async-SGD for Distributed
Deep Learning").
"""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from ringspark.estimators.options.sync import Asynchronous, ParameterServer
from ringspark.estimators.parallel.base import apply_change
from ringspark.estimators.parallel.sharded.parameter_shards import hide_empty_groups

# One worker's gradients of a step, by the parameter's index, and the settings of its optimizer's groups.
Gradients = Mapping[int, torch.Tensor]
Groups = Sequence[Mapping[str, Any]]
# Worker -> the gradients that it pushed in one step, and its parameter groups.
_Pushes = dict[int, tuple[dict[int, torch.Tensor], Groups]]


class WorkerLeftError(RuntimeError):
    """A worker that the training needs has left, or takes no steps."""


class Clocks:
    """Each worker's number of pushed steps.

    Stale synchronous parallel: a worker that has pushed c steps may read only if every worker has pushed at
    least c - s steps, where s is the bound. A worker is therefore at most s steps ahead when it reads.
    """

    def __init__(self, size: int) -> None:
        self.pushed = [0] * size

    @property
    def slowest(self) -> int:
        return min(self.pushed)

    def tick(self, worker: int) -> None:
        self.pushed[worker] += 1

    def may_read(self, clock: int, bound: int | None) -> bool:
        return bound is None or self.slowest >= clock - bound

    def towards(self, clock: int) -> int:
        """Returns the sum of the workers' numbers of steps, each limited to `clock`."""
        return sum(min(pushed, clock) for pushed in self.pushed)

    def behind(self, clock: int) -> list[int]:
        return [rank for rank, pushed in enumerate(self.pushed) if pushed < clock]

    def of_others(self, worker: int) -> int:
        return sum(self.pushed) - self.pushed[worker]


class ParameterTable:
    """The slices of parameters that one server holds.

    Attributes:
        staleness: Maps the staleness of a push, in steps of other workers, to the number of such pushes.
        failure: Error that the optimizer raised in a step, or None.
    """

    def __init__(
        self,
        held: Mapping[int, torch.Tensor],
        optimizer: torch.optim.Optimizer | None,
        size: int,
        sync: Asynchronous,
        timeout_seconds: float = 600.0,
    ) -> None:
        """Stores the slices.

        Args:
            held: The slice of each parameter that this server holds and its optimizer updates, 1-D, by the
                parameter's index.
            optimizer: Updates the slices; None for a table that only counts steps.
            timeout_seconds: How long to wait for a worker that takes no step.
        """
        self.held = dict(held)
        self.clocks = Clocks(size)
        self.staleness: Counter[int] = Counter()
        self.failure: Exception | None = None
        self._optimizer = optimizer
        self._size = size
        self._sync = sync
        self._corrects = isinstance(sync, ParameterServer) and sync.correction == "staleness"
        self._timeout = timeout_seconds
        self._changed = threading.Condition()
        self._left: dict[int, int] = {}  # rank -> its clock when it left
        self._seen = [0] * size  # steps of other workers at a worker's last read
        # Clock -> worker -> pushes that wait for the other workers.
        self._waiting: dict[int, _Pushes] = {}
        self._moves: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}

    def push(self, worker: int, gradients: Gradients, groups: Groups, *, ends_step: bool) -> None:
        """Takes a worker's gradients and optimizer settings; `ends_step` marks the last push of a step."""
        with self._changed:
            if self._sync.in_step:
                self._keep(worker, gradients, groups)
            else:
                late = self.clocks.of_others(worker) - self._seen[worker]
                if gradients:
                    steps = late / (self._size - 1) if self._corrects and self._size > 1 else 0.0
                    self._step(gradients, groups, 1.0 / self._size / max(1.0, steps))
                if ends_step:
                    self.staleness[late] += 1
            if ends_step:
                self.clocks.tick(worker)
                self._apply_whole_steps()
                self._changed.notify_all()

    def pull(
        self,
        worker: int,
        indices: Sequence[int] | None,
        clock: int,
        bound: int | None,
        progress: Callable[[], None] = lambda: None,
    ) -> list[torch.Tensor]:
        """Returns copies of slices, once the reader is at most `bound` steps ahead of the slowest worker.

        Args:
            indices: Parameters to read; None for all.
            clock: Number of steps that the reader has pushed.
            progress: Function called at each step that another worker takes while this call waits.
        """
        while True:
            with self._changed:
                if self._may_read(clock, bound):
                    self._seen[worker] = self.clocks.of_others(worker)
                    wanted = self.held if indices is None else indices
                    return [self.held[index].detach().clone() for index in wanted]
                self._await_step(clock - (bound or 0))
            # Without the lock, because it may send a message, and a peer may not read it.
            progress()

    def sum_step(self) -> list[torch.Tensor]:
        """Sums the gradients that all workers have pushed in the current step; returns the sums.

        The optimizer will use these tensors, so the caller may change them until its own worker's tick.
        """
        with self._changed:
            clock = self.clocks.slowest
            of_clock = self._waiting.get(clock, {})
            if not of_clock:
                return []
            first, sums = min(of_clock), _sum_workers(of_clock)
            self._waiting[clock] = {first: (sums, of_clock[first][1])}
            return [*sums.values()]

    def leave(self, worker: int) -> None:
        """Marks a worker as gone; later reads raise an error."""
        with self._changed:
            self._left.setdefault(worker, self.clocks.pushed[worker])
            self._changed.notify_all()

    @torch.no_grad()
    def load(self, values: Mapping[int, torch.Tensor]) -> None:
        with self._changed:
            for index, value in values.items():
                self.held[index].copy_(value)

    def move(self, changes: Mapping[int, tuple[torch.Tensor, torch.Tensor]]) -> None:
        """Applies a callback's changes: parameter index -> (values when they were read, values now).

        With staleness 0 the changes wait for the next step, because a slow worker may still have to read the
        current values.
        """
        with self._changed:
            self._moves = dict(changes)
            if not self._sync.in_step:
                self._apply_moves()

    @torch.no_grad()
    def _apply_moves(self) -> None:
        for index, (before, after) in self._moves.items():
            held = self.held[index]
            held.copy_(apply_change(held, before, after))
        self._moves = {}

    def _may_read(self, clock: int, bound: int | None) -> bool:
        if self.failure is not None:
            raise self.failure
        if self._left:
            rank, at = min(self._left.items())
            raise WorkerLeftError(f"rank {rank} left the training after its step {at}")
        return self.clocks.may_read(clock, bound)

    def _await_step(self, needed: int) -> None:
        before = self.clocks.towards(needed)

        def has_news() -> bool:
            return self.failure is not None or bool(self._left) or self.clocks.towards(needed) > before

        if not self._changed.wait_for(has_news, self._timeout):
            rank = self.clocks.behind(needed)[0]
            raise WorkerLeftError(
                f"rank {rank} has taken no step for {self._timeout:g} s after its step "
                f"{self.clocks.pushed[rank]}, and other workers wait for its step {needed}; "
                "raise timeoutSeconds if the rank is only slow"
            )

    def _keep(self, worker: int, gradients: Gradients, groups: Groups) -> None:
        of_clock = self._waiting.setdefault(self.clocks.pushed[worker], {})
        kept, _ = of_clock.get(worker, ({}, groups))
        for index, gradient in gradients.items():
            kept[index] = kept[index] + gradient if index in kept else gradient
        of_clock[worker] = (kept, groups)

    def _apply_whole_steps(self) -> None:
        for clock in sorted(clock for clock in self._waiting if clock < self.clocks.slowest):
            of_clock = self._waiting.pop(clock)
            self._apply_moves()
            if sums := _sum_workers(of_clock):
                self._step(sums, of_clock[min(of_clock)][1], 1.0)

    def _step(self, gradients: Gradients, groups: Groups, rate_share: float) -> None:
        """Takes an optimizer step with `rate_share` times the learning rate of `groups`."""
        assert self._optimizer is not None
        for index, tensor in self.held.items():
            gradient = gradients.get(index)
            tensor.grad = None if gradient is None else gradient.to(tensor)
        for group, settings in zip(self._optimizer.param_groups, groups, strict=True):
            group.update(settings)
            group["lr"] = settings["lr"] * rate_share
        try:
            with hide_empty_groups(self._optimizer):
                self._optimizer.step()
        except Exception as error:
            # Pushes have no answer, so each worker gets the error at its next read.
            self.failure = error
            self._changed.notify_all()
        for tensor in self.held.values():
            tensor.grad = None


def _sum_workers(of_clock: _Pushes) -> dict[int, torch.Tensor]:
    sums: dict[int, torch.Tensor] = {}
    for worker in sorted(of_clock):
        for index, gradient in of_clock[worker][0].items():
            sums[index] = sums[index] + gradient if index in sums else gradient
    return sums
