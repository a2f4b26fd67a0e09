"""A gang without Spark over hosts of this machine, and cables of a given rate between them.

    with Network(num_hosts=2) as network, shaped(network, megabits=100):
        texts = run_on_hosts(network, work, "torch")    # `work` as for `run_spawned`, a text for each rank

The rate holds for what each host sends. `tc` shapes it, so `shaping_refusal` says where the kernel cannot.
"""

from __future__ import annotations

import functools
import os
import secrets
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import cloudpickle
from namespaces import Host, Network, refusal

from ringspark.estimators.collectives import Meeting, Member, collective_class
from ringspark.estimators.launch.gang_task import Work, work_and_leave
from ringspark.estimators.training.phase import Status

# Below the size of the largest segment, a cable would let none through.
_BURST_BYTES = 128 << 10
_LONGEST_SECONDS = 600.0


@functools.cache
def shaping_refusal() -> str:
    """Returns why no cable's rate can be set here; empty if it can."""
    if reason := refusal():
        return reason
    try:
        with Network(num_hosts=1) as network, shaped(network, megabits=100):
            return ""
    except (OSError, RuntimeError) as error:
        return f"tc cannot shape a cable here: {error}"


@contextmanager
def shaped(network: Network, *, megabits: float) -> Iterator[None]:
    """Lets each host send so many million bits a second."""
    for host in network.hosts:
        _tc(host, f"replace dev eth0 root tbf rate {megabits}mbit burst {_BURST_BYTES} latency 1s")
    try:
        yield
    finally:
        for host in network.hosts:
            _tc(host, "del dev eth0 root")


def _tc(host: Host, words: str) -> None:
    command = ["ip", "netns", "exec", host.space, "tc", "qdisc", *words.split()]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise RuntimeError(done.stderr.strip())


def bytes_out(host: Host) -> int:
    """The bytes that a host has sent over its cable, with all headers."""
    path = "/sys/class/net/eth0/statistics/tx_bytes"
    # /proc/net is that of the reader's own namespace, as /sys would be only where it is mounted anew.
    read = ["ip", "netns", "exec", host.space, "cat", path]
    return int(subprocess.run(read, capture_output=True, text=True, check=True).stdout)


def run_on_hosts(network: Network, work: Work, collective: str, *, ranks_per_host: int = 1) -> list[str]:
    """Runs `work` on every rank, each a process on its host; returns the texts in rank order.

    Raises:
        RuntimeError: A rank failed; with the last lines of its output.
    """
    hosts = network.hosts
    members = [
        Member(
            rank=cross * ranks_per_host + local,
            size=len(hosts) * ranks_per_host,
            local_rank=local,
            local_size=ranks_per_host,
            cross_rank=cross,
            cross_size=len(hosts),
            host=host.address,
        )
        for cross, host in enumerate(hosts)
        for local in range(ranks_per_host)
    ]
    with tempfile.TemporaryDirectory(prefix="ringspark-hosts-") as name:
        folder = Path(name)
        task = (members, collective, secrets.token_bytes(32), work)
        (folder / "task").write_bytes(cloudpickle.dumps(task))
        environment = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join(sys.path)}
        processes: list[subprocess.Popen[Any]] = []
        try:
            for member in members:
                with (folder / f"output-{member.rank}").open("w") as output:
                    command = [sys.executable, __file__, name, str(member.rank)]
                    host = hosts[member.cross_rank]
                    processes.append(host.start(command, stdout=output, stderr=output, env=environment))
            _wait(processes, folder)
        finally:
            for process in processes:
                process.kill()
                process.wait()
        return [(folder / f"result-{member.rank}").read_text() for member in members]


def _wait(processes: list[subprocess.Popen[Any]], folder: Path) -> None:
    end = time.monotonic() + _LONGEST_SECONDS
    while any(process.poll() is None for process in processes):
        for rank, process in enumerate(processes):
            if process.poll() or time.monotonic() > end:
                told = (folder / f"output-{rank}").read_text()[-3000:]
                raise RuntimeError(f"rank {rank} ended with {process.poll()}:\n{told}")
        time.sleep(0.02)


def main() -> None:
    """One rank."""
    import torch

    folder, rank = Path(sys.argv[1]), int(sys.argv[2])
    members, collective, secret, work = cloudpickle.loads((folder / "task").read_bytes())
    kind, status = collective_class(collective), Status("connecting")
    torch.set_num_threads(1)
    address = folder / "address"
    rendezvous = None
    if rank == 0:
        rendezvous = kind.open_rendezvous(members[0], secret)
        (folder / "address.new").write_text(rendezvous.address)
        os.replace(folder / "address.new", address)
    while not address.exists():
        time.sleep(0.02)
    meeting = Meeting(address=address.read_text(), secret=secret, timeout_seconds=60.0)
    connected = kind.connect(members[rank], meeting)
    try:
        result = work_and_leave(connected, work, "cpu", status)
    finally:
        if rendezvous is not None:
            rendezvous.close()
    (folder / f"result-{rank}").write_text(result)


if __name__ == "__main__":
    main()
