"""Hosts of their own on this machine: network namespaces on one switch, each with a host name and table.

A process in one sees its own interfaces and host name, and reaches the others over the
switch. The file system is shared. Needs the right to make namespaces (root, or CAP_SYS_ADMIN and
CAP_NET_ADMIN): `refusal` says why not.
"""

from __future__ import annotations

import functools
import os
import shutil
import subprocess
import uuid
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

# `ip netns exec NAME` gives a process the table NAME/hosts in here.
_TABLES = Path("/etc/netns")


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


@dataclass
class Host:
    """One host.

    Attributes:
        name: Its host name.
        address: Its address on the switch.
        space: Name of its network namespace.
    """

    name: str
    address: str
    space: str

    def command(self, arguments: Sequence[str]) -> list[str]:
        """Returns the command line that runs `arguments` on this host."""
        named = f'echo {self.name} > /proc/sys/kernel/hostname && exec "$@"'
        return ["ip", "netns", "exec", self.space, "unshare", "-u", "sh", "-c", named, "sh", *arguments]

    def start(self, arguments: Sequence[str], **options: Any) -> subprocess.Popen[Any]:
        """Starts a process on this host, in a session of its own."""
        return subprocess.Popen(self.command(arguments), start_new_session=True, **options)


@dataclass
class Network:
    """A context with hosts host-a, host-b, ... at 10.77.0.1, 10.77.0.2, ...

    Attributes:
        own_names: How each host resolves its own name: "loopback" (127.0.1.1, as Debian writes it),
            "unknown" (not at all) or "address".
    """

    num_hosts: int
    own_names: str = "loopback"
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
            _run("ip", "netns", "del", space, check=False)
            shutil.rmtree(_TABLES / space, ignore_errors=True)

    @property
    def _switch(self) -> str:
        return self._spaces[0]

    def _make(self) -> None:
        stem = f"rs{uuid.uuid4().hex[:8]}"
        names = [f"host-{chr(ord('a') + number)}" for number in range(self.num_hosts)]
        addresses = [f"10.77.0.{number + 1}" for number in range(self.num_hosts)]
        self._space(f"{stem}sw")
        _run("ip", "-n", self._switch, "link", "add", "bridge", "type", "bridge")
        _run("ip", "-n", self._switch, "link", "set", "bridge", "up")
        for name, address in zip(names, addresses, strict=True):
            host = Host(name=name, address=address, space=f"{stem}{name[-1]}")
            table = {other: at for other, at in zip(names, addresses, strict=True) if other != name}
            if self.own_names != "unknown":
                table[name] = "127.0.1.1" if self.own_names == "loopback" else address
            self._space(host.space, table)
            self._plug(host)
            self.hosts.append(host)

    def _space(self, name: str, table: Mapping[str, str] | None = None) -> None:
        _run("ip", "netns", "add", name)
        self._spaces.append(name)
        _run("ip", "-n", name, "link", "set", "lo", "up")
        if table is not None:
            folder = _TABLES / name
            folder.mkdir(parents=True)
            lines = ["127.0.0.1 localhost", *(f"{address} {host}" for host, address in table.items())]
            (folder / "hosts").write_text("\n".join(lines) + "\n")

    def _plug(self, host: Host) -> None:
        """Lays a cable between the host's eth0 and the switch."""
        port = f"port-{host.name}"
        _run(
            "ip",
            "-n",
            self._switch,
            "link",
            "add",
            port,
            "type",
            "veth",
            "peer",
            "name",
            "eth0",
            "netns",
            host.space,
        )
        _run("ip", "-n", self._switch, "link", "set", port, "master", "bridge", "up")
        _run("ip", "-n", host.space, "addr", "add", f"{host.address}/24", "dev", "eth0")
        _run("ip", "-n", host.space, "link", "set", "eth0", "up")


def _run(*command: str, check: bool = True) -> None:
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if check and done.returncode:
        raise RuntimeError(f"{' '.join(command)}: {done.stderr.strip()}")
