"""Which network interface leads to the gang, and the environment that says so to the libraries."""

from __future__ import annotations

import os
import socket
from collections.abc import Iterator, Mapping
from contextlib import contextmanager

import psutil


def interface_of(host: str) -> str | None:
    """Name of this machine's interface that carries `host`'s address, None where none does.

    Gloo binds to what the host name resolves to unless it is told an interface; on many machines
    that is a loopback alias which the other hosts cannot reach.
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
    """Sets environment variables, and puts the former state back.

    Spark reuses its Python workers: what stays in `os.environ` would steer the next job.
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
