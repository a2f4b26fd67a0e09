"""Gang over several hosts: rows/s, and recovery time after a lost host or a broken link.

The hosts are network namespaces of this machine (tests/hosts) and share its cores. So the difference to two
workers on one host is the cost of a network without delay. For the faults, one host runs the master, the
driver and an S3 server, the only store; two of three other hosts train. "seconds" is the longest time without
a step of rank 0 since the fault, including timeoutSeconds (20) and Spark's share. For a delay it is the whole
fit with three workers, the first of its session. "weights" is the largest difference from the undisturbed
training.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from pathlib import Path
from statistics import median
from typing import Any

import harness
from disturbed import DATA, SETTINGS, drop, train
from namespaces import Host, Network, refusal
from spark_hosts import SparkHosts

GANGS = ("horovod", "torch")
BATCH_SIZE = 2048
DELAY_SECONDS = 0.2


@contextmanager
def cluster_of(num_hosts: int, **options: Any) -> Iterator[SparkHosts]:
    """Yields a cluster, and removes its files afterwards."""
    with (
        tempfile.TemporaryDirectory() as folder,
        Network(num_hosts=num_hosts) as network,
        SparkHosts(network, Path(folder), **options) as cluster,
    ):
        yield cluster


def rates(num_hosts: int, rows: int, fits: int, gangs: Sequence[str]) -> list[float]:
    """Returns the median rows/s inside a gang of two workers, by collective. The first fit does not count."""
    data = {"rows": rows, "dim": harness.DIM, "hidden": [128, 128]}
    settings = [{"collective": name, "batchSize": BATCH_SIZE, "epochs": 1} for name in gangs]
    with cluster_of(num_hosts, worker_cores=2 // num_hosts) as cluster:
        _, *told = cluster.results(cluster.drive(settings[0], *settings * fits, **data))
    return [median(fit["rate"] for fit in told[number :: len(gangs)]) for number in range(len(gangs))]


def print_rates(rows: int, fits: int, gangs: Sequence[str]) -> None:
    """Prints the rates on one host and on two."""
    found = zip(gangs, *(rates(num_hosts, rows, fits, gangs) for num_hosts in (1, 2)), strict=True)
    harness.print_table(
        f"hosts: rows/s inside a gang of 2, {rows:,} rows x {harness.DIM} fp32, MLP 32-128-128-1, batch "
        f"{BATCH_SIZE}, {fits} fits",
        ["", "one host", "two hosts", "ratio"],
        [[name, f"{one:,.0f}", f"{two:,.0f}", f"{two / one:.2f}"] for name, one, two in found],
    )


class Trials:
    """One cluster for several trainings, each with one fault. Each method returns a line of the table."""

    def __init__(self, cluster: SparkHosts) -> None:
        self._cluster = cluster
        self._undisturbed = self._fit("torch", 2)["weights"]

    def vanish(self, collective: str) -> list[str]:
        """Cuts the power of a host, and restarts it afterwards."""
        gone: list[Host] = []

        def disturb(host: Host) -> None:
            self._cluster.network.vanish(host)
            gone.append(host)

        line = self._fault("host vanished", disturb, collective)
        for host in gone:
            self._cluster.revive(host)
        return line

    def drop(self, seconds: float, collective: str) -> list[str]:
        """Disconnects a link for some seconds."""
        return self._fault(f"link down for {seconds:g} s", drop(self._cluster, seconds), collective)

    def delay(self, seconds: float, collective: str) -> list[str]:
        """Delays the link to one of three workers."""
        slow = self._cluster.network.slowed_down(self._cluster.workers[0], seconds)
        with slow if seconds else nullcontext():
            told = self._fit(collective, 3)
        return self._line(f"delay of {1000 * seconds:.0f} ms", collective, told, told["seconds"])

    def _fit(self, collective: str, num_workers: int) -> dict[str, Any]:
        settings = SETTINGS | {"collective": collective, "numWorkers": num_workers}
        (told,) = self._cluster.results(self._cluster.drive(settings, **DATA))
        return told

    def _fault(self, name: str, disturb: Callable[[Host], None], collective: str) -> list[str]:
        outcome = train(self._cluster, disturb, collective=collective)
        return self._line(name, collective, outcome.told, outcome.pause_seconds)

    def _line(self, name: str, collective: str, told: dict[str, Any], seconds: float) -> list[str]:
        if "error" in told:
            return [name, collective, f"{seconds:.1f}", told["error"], ""]
        off = max(abs(a - b) for a, b in zip(told["weights"], self._undisturbed, strict=True))
        return [name, collective, f"{seconds:.1f}", str(len(told["restarts"])), f"{off:.1e}"]


def main() -> None:
    """Prints the rates, then runs the faults on one cluster."""
    options = harness.parse(__doc__, rows=(300_000, 4_096), repeats=(3, 1), gangs=(2, 1), trials=(5, 1))
    if reason := refusal():
        print(f"hosts: skipped, {reason}")
        return
    gangs = GANGS[-options.gangs :]
    print_rates(options.rows, options.repeats, gangs)
    with cluster_of(4, is_first_a_worker=False, has_bucket=True) as cluster:
        trials = Trials(cluster)
        hits: list[Callable[[str], list[str]]] = [
            lambda collective: trials.delay(0.0, collective),
            lambda collective: trials.delay(DELAY_SECONDS, collective),
            lambda collective: trials.drop(5.0, collective),
            lambda collective: trials.drop(60.0, collective),
            trials.vanish,
        ]
        table = []
        for hit in hits[: options.trials]:
            for collective in gangs:
                table.append(hit(collective))
                print(*table[-1], flush=True)  # progress
    harness.print_table(
        "hosts: 2 workers on 3 hosts (3 with a delay), 60 steps and a checkpoint every 10",
        ["", "collective", "seconds", "restarts", "weights"],
        table,
    )


if __name__ == "__main__":
    main()
