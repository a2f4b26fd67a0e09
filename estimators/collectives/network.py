"""Finds this host's address and interface towards the gang."""

from __future__ import annotations

import ipaddress
import socket

import psutil


def interface_of(host: str) -> str | None:
    """Returns the name of this machine's interface that carries `host`'s address; None if none does.

    Unless it is told an interface, Gloo binds to the address that the host name resolves to. On many
    machines that is a loopback alias, which the other hosts cannot reach.
    """
    address = _resolved(host)
    for name, addresses in psutil.net_if_addrs().items():
        if any(entry.address == address for entry in addresses):
            return str(name)
    return "lo" if address.startswith("127.") and "lo" in psutil.net_if_addrs() else None


def own_address(host: str, towards: str) -> str:
    """Returns the address of this host by which other hosts reach it; `host` itself if none is found.

    A host's own name often means a loopback address to the host itself (127.0.1.1 on Debian), or nothing at
    all. Then it is the address from which this host speaks to the driver.

    Args:
        host: This host as Spark names it, by name or address.
        towards: The driver's host, which Spark on this host reaches.
    """
    entries = [entry for addresses in psutil.net_if_addrs().values() for entry in addresses]
    own = {entry.address for entry in entries}
    for address in (_resolved(host), _source_towards(towards)):
        if address in own and not ipaddress.ip_address(address).is_loopback:
            return address
    return host


def name_problem(address: str) -> str:
    """Returns what is wrong with this host's own name for a library that binds to what it means.

    Args:
        address: This host's address, see `own_address`.

    Returns:
        The rest of a sentence after the name; empty if other hosts reach this one by it.
    """
    name = socket.gethostname()
    found = _resolved(name)
    if found and found == _resolved(address):
        return ""
    return f"{name} {f'means {found}' if found else 'means nothing'} on that host, whose address is {address}"


def _resolved(host: str) -> str:
    """Returns the address that a name means on this host, IPv4 first; empty if it means none."""
    try:
        found = socket.getaddrinfo(host, 0, type=socket.SOCK_STREAM)
    except (OSError, UnicodeError):
        return ""
    addresses = [str(entry[4][0]) for entry in sorted(found, key=lambda entry: entry[0] != socket.AF_INET)]
    # A link-local address means nothing without its interface.
    return next((address for address in addresses if "%" not in address), "")


def _source_towards(host: str) -> str:
    """Returns the address from which this host would speak to `host`; empty if there is no way."""
    try:
        family, kind, _, _, where = socket.getaddrinfo(host, 9, type=socket.SOCK_DGRAM)[0]
        with socket.socket(family, kind) as probe:
            probe.connect(where)  # sends nothing
            return str(probe.getsockname()[0])
    except (OSError, UnicodeError):
        return ""
