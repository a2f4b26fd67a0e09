"""Runs ranks as threads of one process, for checks on the driver before any worker starts.

Only one rank runs at a time, until it waits for another rank. So each rank can have its own state of the
process's random number generators, and a deadlock is found at once.
"""

from __future__ import annotations

import random
import threading
from collections.abc import Callable, Hashable, Sequence
from functools import reduce
from typing import Any, TypeVar

import numpy as np
import torch

from ringspark.estimators.collectives.base import REDUCTIONS, CollectiveError, ConnectedMember, ReduceOp
from ringspark.estimators.collectives.local_collective import LocalCollective
from ringspark.estimators.collectives.traffic import Member

T = TypeVar("T")


class RankError(RuntimeError):
    """Raised if a rank failed; the rank's own error is the cause."""

    def __init__(self, rank: int, error: BaseException) -> None:
        super().__init__(f"rank {rank}: {type(error).__name__}: {error}")
        self.rank = rank


def run_in_turns(size: int, work: Callable[[InProcessCollective], T]) -> list[T]:
    """Runs `work` on every rank; returns the results in rank order, or raises the first `RankError`."""
    turns = _Turns(size)
    results: dict[int, T] = {}

    def run(rank: int) -> None:
        with turns.lock:
            try:
                collective = InProcessCollective(turns, range(size), rank, ())
                results[rank] = work(collective)
            except BaseException as error:
                turns.fail(rank, error)
            finally:
                turns.leave(rank)

    threads = [threading.Thread(target=run, args=(rank,), name=f"rank {rank}") for rank in range(size)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if turns.failure is not None:
        raise turns.failure from turns.failure.__cause__
    return [results[rank] for rank in range(size)]


class _Turns:
    def __init__(self, size: int) -> None:
        self.lock = threading.Condition()
        self.failure: RankError | None = None
        self._running = set(range(size))
        self._waiting: set[int] = set()
        self._given: dict[Hashable, dict[int, Any]] = {}
        self._taken: dict[Hashable, int] = {}

    def fail(self, rank: int, error: BaseException) -> None:
        if self.failure is None:
            self.failure = RankError(rank, error)
            self.failure.__cause__ = error

    def leave(self, rank: int) -> None:
        self._running.discard(rank)
        self._wake()

    def give(self, key: Hashable, rank: int, value: Any) -> None:
        self._given.setdefault(key, {})[rank] = value
        self._wake()

    def take(self, key: Hashable, rank: int, givers: Sequence[int], takers: int) -> list[Any]:
        """Waits for the values of all `givers` for `key`, returns them; call number `takers` removes them."""
        self._wait(rank, lambda: len(self._given.get(key, ())) == len(givers))
        given = self._given[key]
        self._taken[key] = self._taken.get(key, 0) + 1
        if self._taken[key] == takers:
            del self._given[key], self._taken[key]
        return [given[giver] for giver in givers]

    def _wake(self) -> None:
        self._waiting.clear()
        self.lock.notify_all()

    def _wait(self, rank: int, is_ready: Callable[[], bool]) -> None:
        if is_ready():
            return
        own = torch.get_rng_state(), np.random.get_state(), random.getstate()
        while not is_ready():
            self._waiting.add(rank)
            if self.failure is None and self._waiting == self._running:
                self.fail(rank, CollectiveError("all unfinished ranks wait for each other"))
            if self.failure is not None:
                self._wake()
                raise CollectiveError("another rank failed") from self.failure
            self.lock.wait()
        torch.set_rng_state(own[0])
        np.random.set_state(own[1])
        random.setstate(own[2])


class InProcessCollective(ConnectedMember):
    """A collective for a group of the ranks of `run_in_turns`."""

    name = "in-process"

    def __init__(self, turns: _Turns, ranks: Sequence[int], rank: int, group: tuple[int, ...]) -> None:
        """Joins the group of the world ranks `ranks` as world rank `rank`; `group` identifies the group."""
        size, index = len(ranks), list(ranks).index(rank)
        super().__init__(Member(rank=index, size=size, local_rank=index, local_size=size))
        self._turns, self._ranks, self._me = turns, list(ranks), rank
        self._group = group
        self._exchanges = self._parts = 0
        self._messages: dict[tuple[int, int], int] = {}

    def part(self, groups: Sequence[Sequence[int]]) -> InProcessCollective | LocalCollective | None:
        self._parts += 1
        for number, ranks in enumerate(groups):
            if self.rank in ranks:
                if len(ranks) == 1:
                    return LocalCollective()
                own = [self._ranks[rank] for rank in ranks]
                return InProcessCollective(self._turns, own, self._me, (*self._group, self._parts, number))
        return None

    def all_reduce(self, tensor: torch.Tensor, op: ReduceOp = "sum") -> torch.Tensor:
        return self._reduce(self._start(tensor), op)

    def start_sum(self, tensor: torch.Tensor, name: str) -> Callable[[], None]:
        take = self._start(tensor)

        def wait() -> None:
            tensor.detach().copy_(self._reduce(take))

        return wait

    def all_gather(self, tensor: torch.Tensor, counts: Sequence[int] | None = None) -> list[torch.Tensor]:
        return [piece.clone() for piece in self._start(tensor)()]

    def gather(
        self, tensor: torch.Tensor, counts: Sequence[int] | None = None, root: int = 0
    ) -> list[torch.Tensor]:
        pieces = self.all_gather(tensor, counts)
        return pieces if self.rank == root else []

    def all_to_all(self, pieces: Sequence[torch.Tensor], counts: Sequence[int]) -> list[torch.Tensor]:
        given = self._start([piece.detach().clone() for piece in pieces])()
        return [own[self.rank].clone() for own in given]

    def start_reduce_scatter(self, tensor: torch.Tensor, counts: Sequence[int]) -> Callable[[], torch.Tensor]:
        take, counts = self._start(tensor), list(counts)
        return lambda: torch.split(self._reduce(take), counts)[self.rank].clone()

    def broadcast(self, tensors: list[torch.Tensor], root: int = 0) -> None:
        given = self._start([tensor.detach().clone() for tensor in tensors] if self.rank == root else [])()
        if self.rank != root:
            with torch.no_grad():
                for tensor, value in zip(tensors, given[root], strict=True):
                    tensor.copy_(value)

    def barrier(self) -> None:
        self._start(None)()

    def start_send(self, tensor: torch.Tensor, to: int) -> Callable[[], None]:
        self._turns.give(self._message(self.rank, to), self.rank, tensor.detach().clone())
        return lambda: None

    def start_receive(self, tensor: torch.Tensor, source: int) -> Callable[[], None]:
        key = self._message(source, self.rank)

        def wait() -> None:
            (value,) = self._turns.take(key, self._me, [source], 1)
            tensor.detach().copy_(value)

        return wait

    def close(self) -> None:
        self._release()

    abort = close

    def _start(self, value: Any) -> Callable[[], list[Any]]:
        """Gives this rank's value for the next operation; returns a function that waits for all values."""
        self._exchanges += 1
        key = (self._group, self._exchanges)
        if isinstance(value, torch.Tensor):
            value = value.detach().clone(memory_format=torch.contiguous_format)
        self._turns.give(key, self.rank, value)
        return lambda: self._turns.take(key, self._me, range(self.size), self.size)

    def _message(self, source: int, to: int) -> tuple[Any, ...]:
        number = self._messages[source, to] = self._messages.get((source, to), 0) + 1
        return (self._group, source, to, number)

    def _reduce(self, take: Callable[[], list[torch.Tensor]], op: ReduceOp = "sum") -> torch.Tensor:
        given = take()
        shapes = {tuple(tensor.shape) for tensor in given}
        if len(shapes) > 1:
            raise ValueError(f"every rank must reduce a tensor of the same shape, got {sorted(shapes)}")
        return reduce(REDUCTIONS[op], given).clone()
