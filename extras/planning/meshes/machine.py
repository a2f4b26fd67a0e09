"""The machine of a prediction: speeds of operators and links, and the ranks per host."""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace

from ringspark.estimators import user_code
from ringspark.estimators.options.sync import AllReduce
from ringspark.extras.model_parallel.fake_collective import Message
from ringspark.extras.planning.calibration import Calibration
from ringspark.extras.planning.exchange_time import Link, ring_seconds, show_seconds
from ringspark.extras.planning.memory.measured_ranks import MeasuredRanks, on_one_worker
from ringspark.extras.planning.work import OperatorRates

# Largest number of processes of a calibration run.
MOST_RANKS = 8


@dataclass(frozen=True, kw_only=True)
class Machine:
    """Hosts with several ranks each, and the links between ranks.

    Attributes:
        inside: Links between ranks of one host, by the number of ranks that communicate. Measured
            links include the slowdown of ranks that share cores.
        between: Link between hosts; None if there is one host.
        wire: Link for a point-to-point send between two ranks of a host.
        cores_per_host: Number of ranks that a host runs at full speed.
    """

    rates: OperatorRates
    inside: Mapping[int, Link]
    between: Link | None
    wire: Link
    ranks_per_host: int
    cores_per_host: int

    def crowding(self, workers: int) -> float:
        """Returns the number of ranks per core, at least 1."""
        return max(1.0, min(workers, self.ranks_per_host) / self.cores_per_host)

    def hosts(self, workers: int) -> int:
        return -(-workers // self.ranks_per_host)

    def link(self, size: int, reach: int) -> Link:
        """Returns the link for a collective operation of `size` ranks spread over `reach` adjacent ranks."""
        if reach > self.ranks_per_host and self.between is not None:
            return self.between
        return self.inside[min(self.inside, key=lambda known: abs(known - size))]

    def exchange(self, messages: Iterable[Message], size: int, reach: int) -> float:
        """Returns the seconds of collective operations of `size` ranks spread over `reach` adjacent ranks."""
        link = self.link(size, reach)
        return sum(_seconds(message, size, link) for message in messages)

    def describe(self, workers: int, source: str) -> str:
        """Returns the numbers in words; `source` says where they are from."""
        near, crowding = max(self.inside), self.crowding(workers)
        between = "" if self.between is None else f"; between hosts {self.between.describe()}"
        shared = f"; {crowding:.3g} workers share a core" if crowding > 1 else ""
        return (
            f"Steps {source}: an operator takes {show_seconds(self.rates.launch)} plus its work at "
            f"{1e-9 / self.rates.flop:,.3g} billion operations and {1e-9 / self.rates.byte:,.3g} billion "
            f"bytes per second; {self.inside[near].describe()}{between}{shared}."
        )

    def sending(self, num_bytes: float, workers: int) -> float:
        link = self.wire if workers <= self.ranks_per_host or self.between is None else self.between
        return link.alpha + num_bytes * link.beta


def _seconds(message: Message, size: int, link: Link) -> float:
    ring = ring_seconds(size, message.num_bytes, link)
    if message.kind == "all_reduce":
        return ring
    if message.kind == "all_to_all":
        # A rank sends everything except its own shard.
        return (size - 1) * (link.alpha + message.num_bytes / size**2 * link.beta)
    if message.kind == "shift":
        return link.alpha + message.num_bytes * link.beta
    return ring / 2


@dataclass(frozen=True, kw_only=True)
class GivenHardware:
    """Numbers that the user gave for the machine, or None. See the arguments of `plan_parallelism`."""

    link: Link | None = None
    between: Link | None = None
    step_seconds: Mapping[int, float] | None = None
    workers_per_host: int | None = None
    cores_per_host: int | None = None

    def make_machine(
        self,
        network: MeasuredRanks,
        workers: int,
        rates: OperatorRates,
        inside: Mapping[int, Link],
        wire: Link,
        cores: int | None = None,
    ) -> Machine:
        """Returns the machine from the user's numbers; the arguments replace numbers that the user omitted.

        If the seconds of steps are given, only the ratio of the rates is used.
        """
        if self.step_seconds is not None:
            rates = rates.fit({n: (network.work(n), seconds) for n, seconds in self.step_seconds.items()})
        ranks = min(workers, self.workers_per_host or workers)
        return Machine(
            rates=rates,
            inside=inside if self.link is None else {2: self.link},
            between=self.between,
            wire=self.link or wire,
            ranks_per_host=ranks,
            cores_per_host=self.cores_per_host or cores or ranks,
        )

    def measure_machine(self, network: MeasuredRanks, workers: int, repeats: int) -> Machine:
        """Measures on this machine the numbers that are not given. Raises WorkerError if a process failed."""
        num_ranks = next(
            n for n in range(min(max(2, workers), MOST_RANKS), 0, -1) if workers % n == 0 or n == 2
        )
        found = Calibration(
            config=replace(on_one_worker(network.config), collective="torch", sync=AllReduce()),
            objects=user_code.dumps(network.objects),
            inputs=network.inputs,
            labels=network.labels,
            rows=calibration_rows(network.config.batch_size) if self.step_seconds is None else (),
            repeats=repeats,
        ).run(num_ranks)
        assert found.rates is not None
        assert found.wire is not None
        cores = count_cores()
        shared = max(1.0, num_ranks / cores)
        # Seconds of a rank with its own core.
        own = self.step_seconds or {n: seconds / shared for n, seconds in found.step_seconds.items()}
        # The measured ranks may share cores more, or less, than the planned ranks.
        ranks = min(workers, self.workers_per_host or workers)
        share = max(1.0, ranks / (self.cores_per_host or cores)) / shared
        inside = {n: link.times(share) for n, link in found.inside.items()}
        given = replace(self, step_seconds=own)
        return given.make_machine(network, workers, found.rates, inside, found.wire.times(share), cores)


def calibration_rows(rows: int) -> tuple[int, int]:
    """Returns two numbers of rows to measure steps with, for a training with `rows` rows per step."""
    return max(1, rows // 8), max(2, rows // 2)


def count_cores() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
