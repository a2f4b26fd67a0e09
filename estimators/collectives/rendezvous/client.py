"""A rank's side of the rendezvous: one authenticated connection that lasts as long as the gang."""

from __future__ import annotations

import socket
import threading
import time
import zlib
from collections.abc import Sequence
from contextlib import suppress
from copy import copy
from itertools import count, cycle

from ringspark.estimators.collectives.base import CollectiveError
from ringspark.estimators.collectives.rendezvous import own_sockets
from ringspark.estimators.collectives.rendezvous.channel import (
    HANDSHAKE_SECONDS,
    LENGTH_BYTES,
    ChannelError,
    Marks,
    prove_as_client,
    read_exactly,
    rest_bytes,
)
from ringspark.estimators.collectives.rendezvous.server import (
    DONE,
    MAX_WAIT_SECONDS,
    NUMBER_BYTES,
    REFUSED,
    pack,
    unpack,
)
from ringspark.estimators.collectives.traffic import Member

_ATTEMPT_SECONDS = 5.0
_PAUSE_SECONDS = 0.01
# Largest difference of the ranks' start times, with imports on a busy machine.
START_SECONDS = 60.0


class RendezvousClient:
    """An authenticated connection to rank 0's server; several threads may use it.

    Args:
        address: "host:port" of the server; "host:port,port" with all `rendezvous_ports` if it is unknown.
        timeout_seconds: How long to try to reach the server.

    Attributes:
        patience: How long this rank waits for the other ranks to start, in seconds.
    """

    def __init__(self, member: Member, address: str, secret: bytes, timeout_seconds: float) -> None:
        own_sockets.allow_sockets(member.size)
        self.member = member
        # With one port, rank 0 is running; otherwise it may not have started yet.
        is_running = "," not in address
        self.patience = timeout_seconds if is_running else max(timeout_seconds, START_SECONDS)
        self._connection, marks = _connect(member, address, secret, self.patience)
        # Rank 0 may be suspended, and no rank should wait forever.
        self._connection.settimeout(timeout_seconds + MAX_WAIT_SECONDS)
        self._requests = _Requests(self._connection, marks)
        self._prefix = ""

    def within(self, name: str, member: Member) -> RendezvousClient:
        """Returns a client on the same connection, with separate keys for the group of ranks `name`."""
        part = copy(self)
        part.member, part._prefix = member, f"{self._prefix}{name}/"
        return part

    def set(self, key: str, value: bytes) -> None:
        self._ask(b"set", self._name(key), value)

    def get(self, key: str, seconds: float = 0.0) -> bytes | None:
        """Returns the key's value. Waits up to `seconds` for it, then returns None."""
        return self._ask_until(seconds, b"get", self._name(key))[0]

    def add(self, key: str, amount: int) -> int:
        return int(self._ask(b"add", self._name(key), str(amount).encode())[0] or 0)

    def delete(self, key: str) -> bool:
        return self._ask(b"delete", self._name(key))[0] is not None

    def meet(self, name: str, timeout_seconds: float) -> None:
        """Waits until every rank has called `meet` with this name; a timeout's error names missing ranks."""
        self._meet(b"all", name, b"", timeout_seconds)

    def all_gather(self, name: str, value: bytes, timeout_seconds: float) -> list[bytes]:
        """Like `meet`; returns all ranks' values, in rank order."""
        return unpack(self._meet(b"all", name, value, timeout_seconds))

    def all_to_all(self, name: str, parts: Sequence[bytes], timeout_seconds: float) -> list[bytes]:
        """Like `meet`; sends each rank its part, all of one length. Returns the parts for this rank."""
        joined, width = zlib.compress(b"".join(parts)), len(parts[0])
        found = self._meet(b"parts", name, joined, timeout_seconds)
        return [found[at : at + width] for at in range(0, len(found), width)]

    def _meet(self, kind: bytes, name: str, value: bytes, timeout_seconds: float) -> bytes:
        position = [str(number).encode() for number in (self.member.size, self.member.rank)]
        values, missing = self._ask_until(timeout_seconds, kind, self._name(name), *position, value)
        if values is not None:
            return zlib.decompress(values)
        num_missing, *some = [number.decode() for number in unpack(missing)]
        more = int(num_missing) - len(some)
        raise CollectiveError(
            f"rank {', '.join(some)}{f' and {more} more' if more else ''} of {self.member.size} did not come "
            f"to the rendezvous within {timeout_seconds:g} s; see their logs, or raise timeoutSeconds"
        )

    def close(self) -> None:
        # Closing alone would not wake a thread that waits for an answer.
        with suppress(OSError):
            self._connection.shutdown(socket.SHUT_RDWR)
        self._connection.close()

    def _name(self, key: str) -> bytes:
        return f"{self._prefix}{key}".encode()

    def _ask_until(self, seconds: float, *parts: bytes) -> tuple[bytes | None, bytes]:
        """Repeats a request until the reply has a value. The request's last argument is the waiting time."""
        deadline = time.monotonic() + seconds
        while True:
            left = min(max(deadline - time.monotonic(), 0.0), MAX_WAIT_SECONDS)
            answer = self._ask(*parts, str(int(1000 * left)).encode())
            if answer[0] is not None or left <= 0:
                return answer

    def _ask(self, *parts: bytes) -> tuple[bytes | None, bytes]:
        """Sends a request; returns (value, b""), or (None, the server's explanation)."""
        try:
            answer = self._requests.ask(*parts)
        except OSError as error:
            raise CollectiveError(f"the connection to the rendezvous of rank 0 failed: {error}") from error
        if answer[:1] == REFUSED:
            raise CollectiveError("the rendezvous of rank 0 accepts no more data; lower numWorkers")
        return (answer[1:], b"") if answer[:1] == DONE else (None, answer[1:])


class _Requests:
    """Sends requests of several threads on one connection; a waiting request delays no other request."""

    def __init__(self, connection: socket.socket, marks: Marks) -> None:
        self._connection, self._marks = connection, marks
        self._changed = threading.Condition()
        self._numbers = count()
        self._answers: dict[bytes, bytes] = {}
        self._is_reading = False

    def ask(self, *parts: bytes) -> bytes:
        with self._changed:
            number = (next(self._numbers) % 2**32).to_bytes(NUMBER_BYTES, "big")
            self._connection.sendall(self._marks.seal(number + pack(*parts)))
            while number not in self._answers:
                if self._is_reading:
                    self._changed.wait()
                else:
                    self._read_for_all()
            return self._answers.pop(number)

    def _read_for_all(self) -> None:
        """Reads the next answer, for any thread; meanwhile other threads may send requests."""
        self._is_reading = True
        self._changed.release()
        try:
            length = read_exactly(self._connection, LENGTH_BYTES)
            message = self._marks.open(length, read_exactly(self._connection, rest_bytes(length)))
        finally:
            self._changed.acquire()
            self._is_reading = False
            self._changed.notify_all()
        self._answers[message[:NUMBER_BYTES]] = message[NUMBER_BYTES:]


def _connect(
    member: Member, address: str, secret: bytes, timeout_seconds: float
) -> tuple[socket.socket, Marks]:
    host, ports = address.rsplit(":", 1)
    deadline = time.monotonic() + timeout_seconds
    for port in cycle(ports.split(",")):
        left = deadline - time.monotonic()
        try:
            seconds = max(0.001, min(left, _ATTEMPT_SECONDS))
            connection = socket.create_connection((host, int(port)), timeout=seconds)
        except OSError as error:
            reason: OSError = error
        else:
            try:
                connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
                # With one port it is rank 0 that listens, and this rank may wait in its queue.
                seconds = HANDSHAKE_SECONDS if "," in ports else max(left, HANDSHAKE_SECONDS)
                return connection, prove_as_client(connection, secret, member.rank, seconds)
            except OSError as error:
                connection.close()
                reason = error
        is_stranger = isinstance(reason, ChannelError) and "," not in ports
        if is_stranger or deadline - time.monotonic() <= 0:
            raise CollectiveError(
                f"rank {member.rank} could not join the rendezvous at {address} within "
                f"{timeout_seconds:g} s: {reason}"
            ) from reason
        # Strangers may have filled the queue, or rank 0 has not started yet.
        time.sleep(_PAUSE_SECONDS)
    raise AssertionError("there is always a next port")
