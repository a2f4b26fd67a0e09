"""Keeps strangers from the ports that Gloo opens while the ranks connect.

Gloo accepts the first connection as the peer that it waits for. On Linux, a filter drops packets from hosts
of non-members, and all packets once the ranks have connected. While the ranks connect, which takes
milliseconds, other processes on the members' hosts can connect too.
"""

from __future__ import annotations

import json

from ringspark.estimators.collectives.network import own_addresses
from ringspark.estimators.collectives.rendezvous import own_sockets
from ringspark.estimators.collectives.rendezvous.client import RendezvousClient
from ringspark.estimators.collectives.rendezvous.server import SEEN
from ringspark.estimators.collectives.traffic import Member


class PortGuard:
    """Guards the sockets on which this process starts to listen from now on."""

    def __init__(self, addresses: list[str]) -> None:
        self.addresses = addresses
        self._before = set(own_sockets.listening())
        self._guarded: set[int] = set()

    def restrict(self) -> None:
        """Restricts new ports to the members' hosts; call it before publishing a new port."""
        new = own_sockets.listening().keys() - self._before - self._guarded
        if new and self.addresses:
            own_sockets.admit_only(new, self.addresses)
        self._guarded |= new

    def shut(self) -> None:
        own_sockets.admit_only(own_sockets.listening().keys() - self._before, [])


def machines_of(client: RendezvousClient, member: Member) -> list[str]:
    """Returns the addresses from which members connect. Runs on every rank.

    The list is empty if a service mesh or address translation changes addresses: rank 0 then sees a member
    connect from an address that the member's host does not have.
    """
    own = list(own_addresses())
    seen = (client.get(f"{SEEN}{member.rank}") or b"").decode()
    known = json.dumps(own if seen in own else []).encode()
    gathered = [json.loads(text) for text in client.all_gather("addresses", known, client.patience)]
    return sorted(set().union(*gathered)) if all(gathered) else []
