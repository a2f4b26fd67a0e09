"""Keeps strangers from the ports that Gloo opens while the ranks connect to each other.

Gloo listens, takes the first connection for the peer that it waits for, and cannot check it. But its sockets
belong to this process, and on Linux a socket can get a filter that sees each packet first. So before a rank
tells the others where it listens, the filter drops packets from machines other than the members'. When all
ranks have connected, it drops packets from everywhere. Established connections have their own sockets and
go on.

One gap remains: processes on the members' machines can connect in the milliseconds in which the ranks do.
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
    """Guards the sockets on which this process begins to listen from now on.

    Args:
        addresses: Addresses of the members' machines; empty if they are not known.
    """

    def __init__(self, addresses: list[str]) -> None:
        self._addresses = addresses
        self._before = set(own_sockets.listening())
        self._guarded: set[int] = set()

    def restrict(self) -> None:
        """Opens new ports to the members' machines only; call it before anybody learns of a new port."""
        new = own_sockets.listening().keys() - self._before - self._guarded
        if new and self._addresses:
            own_sockets.admit_only(new, self._addresses)
        self._guarded |= new

    def shut(self) -> None:
        """Closes the ports to everybody; call it when all ranks are connected."""
        own_sockets.admit_only(own_sockets.listening().keys() - self._before, [])


def machines_of(client: RendezvousClient, member: Member, timeout_seconds: float) -> list[str]:
    """Returns the addresses from which members connect, once every rank has called it.

    The list is empty if the addresses cannot be known: rank 0 saw a member come from an address that is
    not the member's own, so something on the way (a service mesh, address translation) changes them.
    """
    own = _own_addresses()
    seen = (client.get(f"{SEEN}{member.rank}") or b"").decode()
    known = json.dumps(own if seen in own else []).encode()
    gathered = [json.loads(text) for text in client.gather("addresses", known, client.patience)]
    if member.rank == 0:
        union = sorted(set().union(*gathered)) if all(gathered) else []
        client.set(_KEY, json.dumps(union).encode())
    found: list[str] = json.loads(client.get(_KEY, timeout_seconds) or b"[]")
    return found


def _own_addresses() -> list[str]:
    """Returns the addresses of all interfaces of this machine."""
    entries = [entry for interface in psutil.net_if_addrs().values() for entry in interface]
    found = [entry.address for entry in entries if entry.family in (socket.AF_INET, socket.AF_INET6)]
    # A link-local address means nothing without its interface.
    return [address for address in found if "%" not in address]
