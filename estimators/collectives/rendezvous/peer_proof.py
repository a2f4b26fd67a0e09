"""Proves that the libraries' data connections lead to members of the run.

Each rank sends every other rank an HMAC-SHA256 through the library itself. Later messages are not
authenticated: whoever can change packets can change gradients.
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
# Connected members need milliseconds, but a stranger may send nothing.
PROOF_SECONDS = 60.0


def shared_nonce(client: RendezvousClient, member: Member, timeout_seconds: float) -> bytes:
    """Returns a random number of this gang, made by rank 0. Runs on every rank."""
    mine = b"" if member.rank else os.urandom(PROOF_BYTES)
    return client.all_gather("connected", mine, timeout_seconds)[0]


def proofs_for(member: Member, nonce: bytes, secret: bytes) -> bytes:
    """Returns the proofs that this rank sends: `PROOF_BYTES` for each rank, in rank order."""
    return b"".join(_proof(member.rank, other, nonce, secret) for other in range(member.size))


def check_proofs(member: Member, nonce: bytes, secret: bytes, received: bytes) -> None:
    """Checks the proofs of all ranks, `PROOF_BYTES` from each rank; an error names the expected rank."""
    for other in range(member.size):
        proof = received[PROOF_BYTES * other : PROOF_BYTES * (other + 1)]
        if not hmac.compare_digest(proof, _proof(other, member.rank, nonce, secret)):
            raise CollectiveError(
                f"rank {member.rank} is connected to a stranger instead of rank {other}; start the training "
                "again, on a network that only the cluster can reach"
            )


def _proof(sender: int, receiver: int, nonce: bytes, secret: bytes) -> bytes:
    return hmac.new(
        secret, b"connected" + nonce + struct.pack("!II", sender, receiver), hashlib.sha256
    ).digest()
