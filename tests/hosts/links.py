"""Hosts with shaped links between them, and gangs on them without Spark.

    with shaped_hosts(2, mbit=100) as hosts:
        results = hosts.run(steps, 30, ranks_per_host=1, collective="torch")

`steps(collective, 30)` runs on every rank, in a new process on its host, and returns a JSON value. `results`
has one entry per rank, in rank order. `wire_bytes()` returns the bytes that the rank's host has sent so far,
from the counter of its network card: with headers, for all ranks of the host. `link_refusal()` returns why
links cannot be shaped here. If a program is killed, the next one removes its hosts.

Each host has a cable to one switch. Both ends of the cable send at most `mbit` million bits per second,
limited by `tc`'s token bucket, so a link is full duplex. Many kernels lack `netem`, so a process delays the
packets. It can carry about 100 Mbit/s, but not 1 Gbit/s.
"""

from __future__ import annotations

import functools
import json
import os
import secrets
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from itertools import count
from pathlib import Path
from typing import Any

import cloudpickle
from namespaces import Host, Network, refusal

# The link is not shaped if the measured rate is below this share of the target, or above its inverse.
_TRUE_SHARE = 0.8
_TRIES = 5
# The first gang's port; each later gang takes the next. In a new namespace every port is free, but a used
# port stays in use for a minute.
_FIRST_PORT = 20_000

_RECEIVE = """
import socket, time
listener = socket.create_server(("", 9))
print("ready", flush=True)
link, _ = listener.accept()
for _ in range(3):
    link.sendall(link.recv(1))
link.recv(1)
begin, got = time.perf_counter(), 0
while data := link.recv(1 << 16):
    got += len(data)
print(got / (time.perf_counter() - begin))
"""
_SEND = """
import socket, sys, time
link = socket.create_connection((sys.argv[1], 9), timeout=10)
link.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
trips = []
for _ in range(3):
    begin = time.perf_counter()
    link.sendall(b"1")
    link.recv(1)
    trips.append(time.perf_counter() - begin)
link.sendall(bytes(1 + int(sys.argv[2])))
print(min(trips))
"""


@functools.cache
def link_refusal() -> str:
    """Returns why no shaped links can be made here; empty if they can."""
    if reason := refusal():
        return reason
    name = f"rs{os.getpid()}xlink"
    subprocess.run(["ip", "netns", "add", name], check=True)
    try:
        shaped = subprocess.run(_shape(name, "lo", 100), capture_output=True, text=True, check=False)
    except OSError as error:
        return f"tc is missing (apt-get install iproute2): {error}"
    finally:
        subprocess.run(["ip", "netns", "del", name], check=False)
    return f"tc cannot shape a link here: {shaped.stderr.strip()}" if shaped.returncode else ""


def wire_bytes() -> int:
    """Returns the bytes that this host's network card has sent so far, including headers."""
    for line in Path("/proc/net/dev").read_text().splitlines():
        name, _, numbers = line.partition(":")
        if name.strip() == "eth0":
            return int(numbers.split()[8])
    raise RuntimeError("this process is on no host of `shaped_hosts`: it has no eth0")


@contextmanager
def shaped_hosts(
    num_hosts: int, *, mbit: float | None = None, delay_ms: float = 0.0
) -> Iterator[ShapedHosts]:
    """Makes hosts, shapes their links, and verifies the shape with a transfer.

    Args:
        num_hosts: Number of hosts.
        mbit: Rate of each link and direction, in million bits per second; None for no limit.
        delay_ms: Additional round-trip time between two hosts, in milliseconds.

    Raises:
        RuntimeError: A transfer found another rate or delay.
    """
    with Network(num_hosts=num_hosts) as network, ExitStack() as slow:
        if mbit is not None:
            for host in network.hosts:
                subprocess.run(_shape(host.space, "eth0", mbit), check=True)
                subprocess.run(_shape(network.switch, host.port, mbit), check=True)
        if delay_ms:
            for host in network.hosts:
                slow.enter_context(network.slowed_down(host, delay_ms / 2000))
        hosts = ShapedHosts(network)
        if num_hosts > 1:
            hosts.check(mbit, delay_ms)
        yield hosts


class ShapedHosts:
    """Hosts on which gangs run.

    Attributes:
        mbit: Measured rate between the first two hosts, in million bits per second.
        round_trip_ms: Smallest round-trip time of a byte, in milliseconds.
    """

    def __init__(self, network: Network) -> None:
        self.network = network
        self.mbit = 0.0
        self.round_trip_ms = 0.0
        self._ports = count(_FIRST_PORT)

    @property
    def hosts(self) -> list[Host]:
        return self.network.hosts

    def check(self, mbit: float | None, delay_ms: float) -> None:
        """Measures transfers from the first host to the second.

        Raises:
            RuntimeError: Rate or delay differ from the requested values.
        """
        for _ in range(_TRIES):
            # A busy machine sends less for a while, but an unshaped link always carries too much.
            self._measure(mbit)
            if mbit is None or _TRUE_SHARE < self.mbit / mbit < 1 / _TRUE_SHARE:
                break
        else:
            raise RuntimeError(f"a link of {mbit:g} Mbit/s was asked for, and carries {self.mbit:.1f}")
        if self.round_trip_ms < delay_ms:
            raise RuntimeError(f"a delay of {delay_ms:g} ms was asked for, it is {self.round_trip_ms:.2f}")

    def _measure(self, mbit: float | None) -> None:
        source, target = self.hosts[:2]
        num_bytes = int((mbit or 1000) * 1e6 / 8 * 0.4)  # takes 0.4 s
        pipes: dict[str, Any] = {"stdout": subprocess.PIPE, "text": True}
        with target.start([sys.executable, "-c", _RECEIVE], **pipes) as receiver:
            receiver.stdout.readline()
            words = [sys.executable, "-c", _SEND, target.address, str(num_bytes)]
            sent = subprocess.run(source.command(words), capture_output=True, text=True, check=False)
            if sent.returncode:
                receiver.kill()
                raise RuntimeError(f"{source.name} does not reach {target.name}: {sent.stderr[-500:]}")
            self.mbit = float(receiver.stdout.readline()) * 8 / 1e6
        self.round_trip_ms = 1000 * float(sent.stdout)

    def run(
        self,
        work: Callable[..., Any],
        *args: Any,
        ranks_per_host: int = 1,
        collective: str = "torch",
        timeout_seconds: float = 60.0,
        limit_seconds: float = 540.0,
        environment: dict[str, str] | None = None,
    ) -> list[Any]:
        """Runs `work(collective, *args)` on a gang of `ranks_per_host` ranks on each host.

        Args:
            work: Returns a JSON value.
            timeout_seconds: Longest wait of a rank for another one.
            limit_seconds: Time after which the ranks are killed.
            environment: Additional environment variables of the ranks.

        Returns:
            What each rank returned, in rank order.

        Raises:
            RuntimeError: A rank failed; the message has the end of what it printed.
        """
        from ringspark.estimators.collectives import RendezvousInfo
        from ringspark.estimators.launch.gang_task import assign_ranks

        places = [host for host in self.hosts for _ in range(ranks_per_host)]
        members = assign_ranks([host.address for host in places])
        address = f"{places[0].address}:{next(self._ports)}"
        info = RendezvousInfo(
            address=address, secret=secrets.token_bytes(32), timeout_seconds=timeout_seconds
        )
        # Ranks find the modules next to the caller's.
        inherited = os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
        inherited |= {"OMP_NUM_THREADS": "1"} | (environment or {})
        with tempfile.TemporaryDirectory() as folder:
            ranks = []
            for place, member in zip(places, members, strict=True):
                stem = Path(folder, str(member.rank))
                job = cloudpickle.dumps((member, info, collective, work, args))
                stem.with_suffix(".job").write_bytes(job)
                with stem.with_suffix(".log").open("wb") as log:
                    words = [sys.executable, str(Path(__file__).resolve()), str(stem)]
                    ranks.append(place.start(words, stdout=log, stderr=log, env=inherited))
            try:
                _wait(ranks, limit_seconds)
                failed = [rank for rank, process in enumerate(ranks) if process.returncode]
            finally:
                for process in ranks:
                    process.kill()
                    process.wait()
            if failed:
                logs = (Path(folder, f"{rank}.log").read_text()[-3000:] for rank in failed)
                raise RuntimeError("\n".join(f"rank {r}: {log}" for r, log in zip(failed, logs, strict=True)))
            return [json.loads(Path(folder, f"{member.rank}.json").read_text()) for member in members]


def _wait(ranks: list[subprocess.Popen[Any]], limit_seconds: float) -> None:
    """Returns when all ranks have ended, or when one has failed and the remaining ones had time to report.

    Raises:
        RuntimeError: None has failed, and some are not done in time.
    """
    deadline = time.monotonic() + limit_seconds
    has_failed = False
    while any(process.poll() is None for process in ranks):
        if not has_failed and any(process.returncode for process in ranks):
            has_failed, deadline = True, min(deadline, time.monotonic() + 10)
        if time.monotonic() > deadline:
            if has_failed:
                return
            raise RuntimeError(f"the ranks were not done after {limit_seconds:g} s")
        time.sleep(0.02)


def _shape(space: str, interface: str, mbit: float) -> list[str]:
    """Returns the command that limits what an interface sends."""
    # Burst size: the bytes per millisecond at this rate, at least one large segment.
    burst = max(1 << 16, int(mbit * 1e6 / 8 / 1000))
    limit = burst + int(mbit * 1e6 / 8 * 0.02)  # packets wait up to 20 ms in the queue, then they are dropped
    words = f"tc -n {space} qdisc add dev {interface} root tbf rate {mbit}mbit burst {burst} limit {limit}"
    return words.split()


def _rank(stem: Path) -> None:
    """Runs one rank."""
    import torch

    from ringspark.estimators.collectives import collective_class
    from ringspark.estimators.launch.gang_task import work_and_leave
    from ringspark.estimators.training.phase import Status

    torch.set_num_threads(1)
    member, info, name, work, args = cloudpickle.loads(stem.with_suffix(".job").read_bytes())
    kind = collective_class(name)
    rendezvous = None
    if member.rank == 0:
        port = int(info.address.rpartition(":")[2])
        rendezvous = kind.open_rendezvous(member, info.secret, [port])
    try:
        connected = kind.connect(member, info)
        work_and_leave(
            connected,
            lambda collective, *_: str(
                stem.with_suffix(".json").write_text(json.dumps(work(collective, *args)))
            ),
            "cpu",
            Status("connecting"),
        )
    finally:
        if rendezvous is not None:
            rendezvous.close()


if __name__ == "__main__":
    _rank(Path(sys.argv[1]))
