"""Hosts on this machine: network namespaces, each with a host name and a hosts file.

A process in a namespace sees the interfaces and the host name of its host, and reaches other hosts over a
switch or a router. The file system is shared. Namespaces need permissions (root, or CAP_SYS_ADMIN and
CAP_NET_ADMIN); `refusal` returns what is missing.
"""

from __future__ import annotations

import functools
import os
import re
import shutil
import signal
import subprocess
import sys
import time
import uuid
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

# `ip netns exec NAME` gives a process the file NAME/hosts in this folder.
_TABLES = Path("/etc/netns")
_SLOW_CABLE = Path(__file__).with_name("slow_cable.py")
# Docker's bridge has the same address on every host, and no route to another host.
_DECOY = "172.17.0.1"


@functools.cache
def refusal() -> str:
    """Returns why no namespaces can be made here; empty if they can."""
    missing = [tool for tool in ("ip", "unshare") if shutil.which(tool) is None]
    if missing:
        return f"{', '.join(missing)} missing (apt-get install iproute2 util-linux)"
    name = f"rs{os.getpid()}probe"
    made = subprocess.run(["ip", "netns", "add", name], capture_output=True, text=True, check=False)
    if made.returncode:
        return f"namespaces are not allowed: {made.stderr.strip()}"
    entered = subprocess.run(
        ["ip", "netns", "exec", name, "unshare", "-u", "true"], capture_output=True, text=True, check=False
    )
    subprocess.run(["ip", "netns", "del", name], check=False)
    return f"namespaces cannot be entered: {entered.stderr.strip()}" if entered.returncode else ""


@dataclass(frozen=True, kw_only=True)
class Host:
    """One host.

    Attributes:
        name: Its host name.
        address: Its address for other hosts.
        space: Name of its network namespace.
    """

    name: str
    address: str
    space: str

    @property
    def port(self) -> str:
        """Switch end of this host's cable."""
        return f"port-{self.name}"

    def command(self, arguments: Sequence[str]) -> list[str]:
        """Returns the command line that runs `arguments` on this host."""
        named = f'echo {self.name} > /proc/sys/kernel/hostname && exec "$@"'
        return ["ip", "netns", "exec", self.space, "unshare", "-u", "sh", "-c", named, "sh", *arguments]

    def start(self, arguments: Sequence[str], **options: Any) -> subprocess.Popen[Any]:
        """Starts a process on this host in a new session."""
        return subprocess.Popen(self.command(arguments), start_new_session=True, **options)


@dataclass(kw_only=True)
class Network:
    """A context with hosts host-a, host-b, ... at 10.77.0.1, 10.77.0.2, ... (fd77::1, fd77::2, ...).

    Attributes:
        own_names: How each host resolves its own name: "loopback" (127.0.1.1, as Debian writes it),
            "unknown" (not at all) or "address".
        version: 4 or 6; with 6 the hosts have no other IPv4 address than 127.0.0.1.
        is_routed: Each host is in a separate subnet (10.77.1.1, 10.77.2.1, ...), with a router between.
        has_decoys: Each host has one interface more, before the true one, with the same address on all.
    """

    num_hosts: int
    own_names: str = "loopback"
    version: int = 4
    is_routed: bool = False
    has_decoys: bool = False
    hosts: list[Host] = field(default_factory=list)
    _spaces: list[str] = field(default_factory=list)

    def __enter__(self) -> Network:
        try:
            self._make()
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        for space in self._spaces:
            _remove(space)

    def unplug(self, host: Host) -> None:
        """Unplugs the host's cable from the switch (a router would lose its addresses)."""
        assert not self.is_routed
        _run("ip", "-n", self.switch, "link", "set", host.port, "down")

    def plug_in(self, host: Host) -> None:
        """Plugs the cable in again."""
        _run("ip", "-n", self.switch, "link", "set", host.port, "up")

    def vanish(self, host: Host) -> None:
        """Ends the host like a power failure, without closing its connections."""
        self.unplug(host)
        _end_processes(host.space)

    @contextmanager
    def slowed_down(self, host: Host, seconds: float) -> Iterator[None]:
        """Delays each packet that the host sends or receives by half of `seconds`.

        Many kernels lack `netem`, so a process carries the packets.
        """
        inside = ["ip", "netns", "exec", self.switch]
        slow, fast = (f"{kind}-{host.name}" for kind in ("slow", "fast"))
        cable = [sys.executable, str(_SLOW_CABLE), host.port, slow, str(seconds / 2)]
        _run(*f"ip -n {self.switch} link add {slow} type veth peer name {fast}".split())
        _run(*f"ip -n {self.switch} link set {fast} master bridge up".split())
        _run(*f"ip -n {self.switch} link set {slow} up".split())
        _run(*f"ip -n {self.switch} link set {host.port} nomaster".split())
        with subprocess.Popen([*inside, *cable], start_new_session=True, stdout=subprocess.PIPE) as process:
            try:
                assert process.stdout.readline()
                yield
            finally:
                process.kill()
                _run(*f"ip -n {self.switch} link del {slow}".split())
                _run(*f"ip -n {self.switch} link set {host.port} master bridge".split())

    @property
    def switch(self) -> str:
        """Name of the switch's namespace."""
        return self._spaces[0]

    @property
    def _any(self) -> str:
        return "0.0.0.0/0" if self.version == 4 else "::/0"

    def _make(self) -> None:
        _sweep()
        stem = f"rs{os.getpid()}x{uuid.uuid4().hex[:4]}"
        names = [f"host-{chr(ord('a') + number)}" for number in range(self.num_hosts)]
        self._space(f"{stem}sw")
        if self.is_routed:
            forward = "net.ipv4.ip_forward" if self.version == 4 else "net.ipv6.conf.all.forwarding"
            _run("ip", "netns", "exec", self.switch, "sysctl", "-q", "-w", f"{forward}=1")
        else:
            _run(*f"ip -n {self.switch} link add bridge type bridge".split())
            _run(*f"ip -n {self.switch} link set bridge up".split())
        for number, name in enumerate(names, 1):
            host = Host(name=name, address=self._address(number, 1), space=f"{stem}{name[-1]}")
            self._space(host.space)
            self._plug(host, number)
            self.hosts.append(host)
        for host in self.hosts:
            self._write_table(host)

    def _address(self, number: int, place: int) -> str:
        """The address of a host (place 1) or, in its subnet, of the router (place 254)."""
        subnet, at = (number, place) if self.is_routed else (0, number)
        return f"10.77.{subnet}.{at}" if self.version == 4 else f"fd77:0:0:{subnet}::{at}"

    def _space(self, name: str) -> None:
        _run("ip", "netns", "add", name)
        self._spaces.append(name)
        _run("ip", "-n", name, "link", "set", "lo", "up")

    def _write_table(self, host: Host) -> None:
        table = {other.name: other.address for other in self.hosts if other is not host}
        if self.own_names != "unknown":
            table[host.name] = "127.0.1.1" if self.own_names == "loopback" else host.address
        folder = _TABLES / host.space
        folder.mkdir(parents=True)
        lines = ["127.0.0.1 localhost", *(f"{address} {name}" for name, address in table.items())]
        (folder / "hosts").write_text("\n".join(lines) + "\n")

    def _plug(self, host: Host, number: int) -> None:
        """Lays a cable between the host's eth0 and the switch or router."""
        if self.has_decoys:
            _run(*f"ip -n {host.space} link add docker0 type bridge".split())
            _run(*f"ip -n {host.space} addr add {_DECOY}/16 dev docker0".split())
            _run(*f"ip -n {host.space} link set docker0 up".split())
        cable = f"{host.port} type veth peer name eth0 netns {host.space}"
        _run(*f"ip -n {self.switch} link add {cable}".split())
        bits = 24 if self.version == 4 else 64
        # IPv6 blocks an address in its first second, for duplicate detection.
        flags = "" if self.version == 4 else "nodad"
        _run(*f"ip -n {host.space} addr add {host.address}/{bits} dev eth0 {flags}".split())
        _run(*f"ip -n {host.space} link set eth0 up".split())
        if not self.is_routed:
            _run(*f"ip -n {self.switch} link set {host.port} master bridge up".split())
            return
        router = self._address(number, 254)
        _run(*f"ip -n {self.switch} addr add {router}/{bits} dev {host.port} {flags}".split())
        _run(*f"ip -n {self.switch} link set {host.port} up".split())
        _run(*f"ip -n {host.space} route add {self._any} via {router}".split())


def _sweep() -> None:
    """Removes namespaces of killed tests. Their names contain the process number of the test."""
    listed = subprocess.run(["ip", "netns", "list"], capture_output=True, text=True, check=False)
    for space, pid in re.findall(r"^(rs(\d+)x\w+)", listed.stdout, re.MULTILINE):
        if not Path("/proc", pid).exists():
            _remove(space)


def _remove(space: str) -> None:
    _end_processes(space)
    _run("ip", "netns", "del", space, check=False)
    shutil.rmtree(_TABLES / space, ignore_errors=True)


def _end_processes(space: str) -> None:
    """Kills every process of a namespace, also without its parent's group."""
    for _ in range(100):
        found = subprocess.run(["ip", "netns", "pids", space], capture_output=True, text=True, check=False)
        if not (pids := found.stdout.split()):
            return
        for pid in pids:
            with suppress(ProcessLookupError):
                os.kill(int(pid), signal.SIGKILL)
        time.sleep(0.05)


def _run(*command: str, check: bool = True) -> None:
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if check and done.returncode:
        raise RuntimeError(f"{' '.join(command)}: {done.stderr.strip()}")
