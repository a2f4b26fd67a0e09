"""An authenticated connection between two members of one run.

Both ends know the 32-byte secret of the run. Each sends a random number and an HMAC-SHA256 over both
numbers, so recorded connections cannot be replayed. Only a fixed number of bytes is read from a peer before
its proof. Every later message has an HMAC over a counter, so the connection ends if somebody changes, drops,
repeats or inserts a message. Nothing is encrypted.

    server: MAGIC, 32 random bytes
    client: 32 random bytes, rank (4 bytes), HMAC(secret, "client" + all so far)
    server: HMAC(secret, "server" + all so far)
    then frames: length (4 bytes), payload, HMAC(session key, direction + counter + length + payload)
"""

from __future__ import annotations

import hashlib
import hmac
import os
import socket
import struct
import time

MAGIC = b"ringspark/rdv/1\n"
NONCE_BYTES = 32
MAC_BYTES = 32
LENGTH_BYTES = 4
# A client's answer: random number, rank and proof.
ANSWER_BYTES = NONCE_BYTES + 4 + MAC_BYTES
# Time limit for the whole handshake; a member answers within milliseconds.
HANDSHAKE_SECONDS = 5.0
# A frame normally holds a few addresses of a few hundred bytes.
MAX_FRAME_BYTES = 16 << 20


class ChannelError(OSError):
    """The peer is not a member of this run, or somebody tampered with the connection."""


def _mac(key: bytes, *parts: bytes) -> bytes:
    return hmac.new(key, b"".join(parts), hashlib.sha256).digest()


class Marks:
    """Adds a MAC to each message that one end of a connection sends; checks the MACs of arriving messages."""

    def __init__(self, key: bytes, *, serves: bool) -> None:
        self._key = key
        self._sends, self._hears = (b"server", b"client") if serves else (b"client", b"server")
        self._sent = self._heard = 0

    def seal(self, payload: bytes) -> bytes:
        """Returns the frame of the next message to send; refuses more than `MAX_FRAME_BYTES`."""
        if len(payload) > MAX_FRAME_BYTES:
            raise ValueError(f"a message may have at most {MAX_FRAME_BYTES} bytes, got {len(payload)}")
        length = struct.pack("!I", len(payload))
        mac = _mac(self._key, self._sends, struct.pack("!Q", self._sent), length, payload)
        self._sent += 1
        return length + payload + mac

    def open(self, length: bytes, rest: bytes) -> bytes:
        """Returns the next message that arrived; raises `ChannelError` if its sender is not a member."""
        payload, mac = rest[:-MAC_BYTES], rest[-MAC_BYTES:]
        right = _mac(self._key, self._hears, struct.pack("!Q", self._heard), length, payload)
        self._heard += 1
        if not hmac.compare_digest(mac, right):
            raise ChannelError("a message has a wrong MAC, so no member of this run sent it")
        return payload


def rest_bytes(length: bytes) -> int:
    """Returns the number of bytes that follow the length in a frame."""
    (num_bytes,) = struct.unpack("!I", length)
    if num_bytes > MAX_FRAME_BYTES:
        raise ChannelError(f"a message may have at most {MAX_FRAME_BYTES} bytes, the peer sends {num_bytes}")
    return int(num_bytes) + MAC_BYTES


def make_hello() -> bytes:
    return MAGIC + os.urandom(NONCE_BYTES)


def check_answer(secret: bytes, hello: bytes, answer: bytes) -> tuple[bytes, Marks, int]:
    """Checks a client's proof; returns the server's proof, the `Marks` for later messages, and the rank."""
    said, mac = answer[:-MAC_BYTES], answer[-MAC_BYTES:]
    if not hmac.compare_digest(mac, _mac(secret, b"client", hello, said)):
        raise ChannelError("the peer does not know the secret of this run")
    (rank,) = struct.unpack("!I", said[-4:])
    marks = Marks(_mac(secret, b"session", hello, answer), serves=True)
    return _mac(secret, b"server", hello, answer), marks, rank


def prove_as_client(
    connection: socket.socket, secret: bytes, rank: int, seconds: float = HANDSHAKE_SECONDS
) -> Marks:
    """Proves to the server that this process knows the secret, and checks the server's proof.

    Returns the `Marks` for later messages. The time limit includes the time in the queue of a server that is
    busy with other clients.
    """
    deadline = time.monotonic() + seconds
    hello = read_exactly(connection, len(MAGIC) + NONCE_BYTES, deadline)
    if not hello.startswith(MAGIC):
        raise ChannelError("the server is not a rendezvous of ringspark; start the training again")
    said = os.urandom(NONCE_BYTES) + struct.pack("!I", rank)
    answer = said + _mac(secret, b"client", hello, said)
    connection.sendall(answer)
    mac = read_exactly(connection, MAC_BYTES, deadline)
    if not hmac.compare_digest(mac, _mac(secret, b"server", hello, answer)):
        raise ChannelError("the server does not know the secret of this run")
    connection.settimeout(None)
    return Marks(_mac(secret, b"session", hello, answer), serves=False)


def read_exactly(connection: socket.socket, num_bytes: int, deadline: float | None = None) -> bytes:
    """Reads exactly `num_bytes`; raises ConnectionError at an early end, TimeoutError after the deadline.

    The deadline, by `time.monotonic()`, is for all bytes together: a slow peer gets no more time.
    """
    chunks, missing = [], num_bytes
    while missing:
        if deadline is not None:
            left = deadline - time.monotonic()
            if left <= 0:
                raise TimeoutError("the peer did not prove in time that it knows the secret of this run")
            connection.settimeout(left)
        chunk = connection.recv(min(missing, 1 << 16))
        if not chunk:
            raise ConnectionError("the peer closed the connection")
        chunks.append(chunk)
        missing -= len(chunk)
    return b"".join(chunks)
