"""Finds this host's address and network interface."""

from __future__ import annotations

import ipaddress
import socket

import psutil


def interface_of(host: str) -> str | None:
    """Returns the name of the network interface with `host`'s address, or None.

    Without an interface Gloo binds to the address of the host name, which is often a loopback alias.
    """
    address, own = _resolve(host), own_addresses()
    return own.get(address, "lo" if address.startswith("127.") and "lo" in own.values() else None)


def own_addresses() -> dict[str, str]:
    """Returns the addresses of this host, each with the name of its interface."""
    entries = [(each, name) for name, known in psutil.net_if_addrs().items() for each in known]
    found = {e.address: name for e, name in entries if e.family in (socket.AF_INET, socket.AF_INET6)}
    # A link-local address is useless without its interface.
    return {address: name for address, name in found.items() if "%" not in address}


def own_address(host: str, towards: str) -> str:
    """Returns the address by which other hosts reach this host; `host` if none is found.

    If `host` resolves to a loopback address, returns the address from which it connects to `towards`, the
    driver's host.
    """
    own = own_addresses()
    for address in (_resolve(host), _source_towards(towards)):
        if address in own and not ipaddress.ip_address(address).is_loopback:
            return address
    return host


def name_problem(address: str) -> str:
    """Explains why a library that binds to this host's name does not listen at `address`; "" if it does."""
    name = socket.gethostname()
    found = _resolve(name)
    if found and found == _resolve(address):
        return ""
    resolved = f"resolves to {found}" if found else "does not resolve"
    return f"{name} {resolved} on the host with the address {address}"


def _resolve(host: str) -> str:
    """Returns the address to which a name resolves on this host, IPv4 first; "" if there is none."""
    try:
        found = socket.getaddrinfo(host, 0, type=socket.SOCK_STREAM)
    except (OSError, UnicodeError):
        return ""
    addresses = [str(entry[4][0]) for entry in sorted(found, key=lambda entry: entry[0] != socket.AF_INET)]
    # A link-local address is useless without its interface.
    return next((address for address in addresses if "%" not in address), "")


def _source_towards(host: str) -> str:
    """Returns the address from which this host connects to `host`; "" if there is no route."""
    try:
        family, kind, _, _, where = socket.getaddrinfo(host, 9, type=socket.SOCK_DGRAM)[0]
        with socket.socket(family, kind) as probe:
            probe.connect(where)  # sends nothing
            return str(probe.getsockname()[0])
    except (OSError, UnicodeError):
        return ""
