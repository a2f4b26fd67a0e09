"""Finds the network interface that leads to the gang, and sets the environment that tells the libraries."""

from __future__ import annotations

import os
import socket
from collections.abc import Iterator, Mapping
from contextlib import contextmanager

import psutil


def interface_of(host: str) -> str | None:
    """Returns the name of this machine's interface that carries `host`'s address; None if none does.

    Unless it is told an interface, Gloo binds to the address that the host name resolves to. On many
    machines that is a loopback alias, which the other hosts cannot reach.
    """
    try:
        address = socket.gethostbyname(host)
    except OSError:
        return None
    for name, addresses in psutil.net_if_addrs().items():
        if any(entry.address == address for entry in addresses):
            return str(name)
    return "lo" if address.startswith("127.") and "lo" in psutil.net_if_addrs() else None


@contextmanager
def environment(values: Mapping[str, str]) -> Iterator[None]:
    """Sets environment variables for the block, and restores the former ones.

    Spark reuses its Python workers, so variables left in `os.environ` would affect the next job.
    """
    before = {name: os.environ.get(name) for name in values}
    os.environ.update(values)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value
