"""Keeps strangers from the ports that Gloo opens while the ranks connect to each other.

Gloo listens, takes whoever comes first for the peer that it waits for, and has no way to ask. Its sockets
are this process's own, though: on Linux a socket can be given a filter that sees each packet before it. So,
before a rank tells the others where it listens, packets from other machines than the members' are
dropped, and when all have connected, packets from anywhere. Connections that stand have sockets of
their own and go on.

What stays open: to processes on the members' machines, for the milliseconds in which the ranks connect.
"""

from __future__ import annotations

import json
import socket

import psutil

from ringspark.estimators.collectives.rendezvous import own_sockets
from ringspark.estimators.collectives.rendezvous.client import RendezvousClient
from ringspark.estimators.collectives.rendezvous.server import SEEN
from ringspark.estimators.collectives.traffic import Member

_KEY = "machines"


class PortGuard:
    """Watches over the sockets that this process listens on from now on.

    Args:
        addresses: IPv4 addresses of the members' machines; empty where they are not known.
    """

    def __init__(self, addresses: list[str]) -> None:
        self._addresses = addresses
        self._before = set(own_sockets.listening())
        self._guarded: set[int] = set()

    def restrict(self) -> None:
        """To be called before anybody is told of a new port: leaves it to the members' machines."""
        new = own_sockets.listening().keys() - self._before - self._guarded
        if new and self._addresses:
            own_sockets.admit_only(new, self._addresses)
        self._guarded |= new

    def shut(self) -> None:
        """To be called when all ranks are connected: nobody comes in any more."""
        own_sockets.admit_only(own_sockets.listening().keys() - self._before, [])


def machines_of(client: RendezvousClient, member: Member, timeout_seconds: float) -> list[str]:
    """The addresses that connections of members come from. Returns once every rank is here.

    Empty where that cannot be told: rank 0 has seen a member come from an address that is none of the
    member's own, so that something on the way (a service mesh, address translation) changes them.
    """
    client.set(f"addresses/{member.rank}", json.dumps(_own_addresses()).encode())
    client.meet("ready", timeout_seconds)
    if member.rank == 0:
        addresses: set[str] | None = set()
        for rank in range(member.size):
            own = json.loads(client.get(f"addresses/{rank}") or b"[]")
            if (client.get(f"{SEEN}{rank}") or b"").decode() not in own:
                addresses = None
                break
            assert addresses is not None
            addresses.update(own)
        client.set(_KEY, json.dumps(sorted(addresses or ())).encode())
    client.wait([_KEY], timeout_seconds)
    found: list[str] = json.loads(client.get(_KEY) or b"[]")
    return found


def _own_addresses() -> list[str]:
    """Of all interfaces of this machine."""
    entries = [entry for interface in psutil.net_if_addrs().values() for entry in interface]
    return [entry.address for entry in entries if entry.family == socket.AF_INET]
