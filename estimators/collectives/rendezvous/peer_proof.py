"""Proof that the libraries' own data connections lead to members of the run.

Gloo takes the first connection that comes to its port while the ranks connect, and asks nobody who he is.
So, before anything else is sent, each rank gives each other one an HMAC-SHA256 over a number of this gang
and the two ranks, through the library itself: a stranger in the place of a rank cannot. What is sent
later carries no mark: who can change packets on the way can change gradients.
"""

from __future__ import annotations

import hashlib
import hmac
import os
import struct

from ringspark.estimators.collectives.base import CollectiveError
from ringspark.estimators.collectives.rendezvous.client import RendezvousClient
from ringspark.estimators.collectives.traffic import Member

PROOF_BYTES = 32
# Connected members need milliseconds; a stranger may say nothing at all.
PROOF_SECONDS = 60.0
_KEY = "nonce"


def shared_nonce(client: RendezvousClient, member: Member, timeout_seconds: float) -> bytes:
    """A random number of this gang, from rank 0. Returns once every rank is here."""
    if member.rank == 0:
        client.set(_KEY, os.urandom(PROOF_BYTES))
    client.meet("connected", timeout_seconds)
    nonce = client.get(_KEY)
    assert nonce is not None  # rank 0 has set it before it came
    return nonce


def proofs_for(member: Member, nonce: bytes, secret: bytes) -> bytes:
    """What this rank sends: `PROOF_BYTES` for each rank, in their order."""
    return b"".join(_proof(member.rank, other, nonce, secret) for other in range(member.size))


def check_proofs(member: Member, nonce: bytes, secret: bytes, received: bytes) -> None:
    """Args: received: `PROOF_BYTES` of each rank, in their order.

    Raises:
        CollectiveError: One is not a member's; names the rank whose place somebody has taken.
    """
    for other in range(member.size):
        proof = received[PROOF_BYTES * other : PROOF_BYTES * (other + 1)]
        if not hmac.compare_digest(proof, _proof(other, member.rank, nonce, secret)):
            raise CollectiveError(
                f"rank {member.rank} is connected to a stranger in the place of rank {other}; start the "
                "training again, on a network that only the cluster can reach"
            )


def _proof(sender: int, receiver: int, nonce: bytes, secret: bytes) -> bytes:
    return hmac.new(
        secret, b"connected" + nonce + struct.pack("!II", sender, receiver), hashlib.sha256
    ).digest()
