"""A rank's side of the rendezvous: one proved connection that lasts as long as the gang."""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Sequence
from copy import copy
from itertools import cycle

from ringspark.estimators.collectives.base import CollectiveError
from ringspark.estimators.collectives.rendezvous.channel import Channel, ChannelError, prove_as_client
from ringspark.estimators.collectives.rendezvous.server import DONE, MAX_WAIT_SECONDS, MISSING, pack
from ringspark.estimators.collectives.traffic import Member

# The most missing ranks that an error names.
_SHOWN = 8
_ATTEMPT_SECONDS = 5.0
_PAUSE_SECONDS = 0.01
# How long one rank may start after another, importing its libraries on a busy machine.
START_SECONDS = 60.0


class RendezvousClient:
    """Connects to `address` and proves to be a member; several threads may use it.

    Args:
        member: The place of this rank.
        address: Address of the server, from `RendezvousServer.address` or `meeting_address`.
        secret: Secret of the run.
        timeout_seconds: How long to try to reach the server.

    Attributes:
        patience: How long this rank waits for the others to come, in seconds.

    Raises:
        CollectiveError: The server is out of reach, or does not know the secret.
    """

    def __init__(self, member: Member, address: str, secret: bytes, timeout_seconds: float) -> None:
        self._member = member
        self._lock = threading.Lock()
        # Who was told one port knows that rank 0 is there; the others may have yet to start.
        is_told = "," not in address
        self.patience = timeout_seconds if is_told else max(timeout_seconds, START_SECONDS)
        self._connection, self._channel = _connected(member, address, secret, self.patience)
        # Rank 0 may be stopped, and no rank should wait for its answers for ever.
        self._connection.settimeout(timeout_seconds + MAX_WAIT_SECONDS)
        self._prefix = ""

    def within(self, name: str, member: Member) -> RendezvousClient:
        """Returns this connection for some of the ranks, who meet each other under keys of their own.

        Args:
            name: Name of these ranks, which no others use.
            member: This rank's place among them.
        """
        part = copy(self)
        part._member, part._prefix = member, f"{self._prefix}{name}/"
        return part

    def set(self, key: str, value: bytes) -> None:
        self._ask(b"set", self._name(key), value)

    def get(self, key: str) -> bytes | None:
        """Returns the value of the key; None if it has none."""
        return self._ask(b"get", self._name(key))

    def add(self, key: str, amount: int) -> int:
        """Adds to a number that starts at 0; returns the sum."""
        return int(self._ask(b"add", self._name(key), str(amount).encode()) or 0)

    def swap(self, key: str, expected: bytes, desired: bytes) -> bytes:
        """Sets the key if it has the expected value; returns the value that it has afterwards."""
        return self._ask(b"swap", self._name(key), expected, desired) or b""

    def delete(self, key: str) -> bool:
        """Deletes the key; returns whether it existed."""
        return self._ask(b"delete", self._name(key)) is not None

    def wait(self, keys: Sequence[str], seconds: float) -> bool:
        """Waits for the keys; returns whether all of them exist within that time."""
        deadline = time.monotonic() + seconds
        names = [self._name(key) for key in keys]
        while True:
            left = deadline - time.monotonic()
            # Waits in slices, so that other threads get a turn on the connection.
            slice_ms = int(1000 * min(max(left, 0.0), MAX_WAIT_SECONDS / 10))
            if self._ask(b"wait", str(slice_ms).encode(), *names) is not None:
                return True
            if left <= 0:
                return False

    def meet(self, name: str, timeout_seconds: float) -> None:
        """Returns once every rank has called it with this name.

        Raises:
            CollectiveError: Some ranks have not called it in time; the message names them.
        """
        keys = [f"{name}/{rank}" for rank in range(self._member.size)]
        self.set(keys[self._member.rank], b"")
        if not self.wait(keys, timeout_seconds):
            missing = [str(rank) for rank, key in enumerate(keys) if self.get(key) is None]
            more = f" and {len(missing) - _SHOWN} more" if len(missing) > _SHOWN else ""
            raise CollectiveError(
                f"rank {', '.join(missing[:_SHOWN])}{more} of {self._member.size} did not come to the "
                f"rendezvous within {timeout_seconds:g} s"
            )

    def close(self) -> None:
        self._connection.close()

    def _name(self, key: str) -> bytes:
        return f"{self._prefix}{key}".encode()

    def _ask(self, *parts: bytes) -> bytes | None:
        """Sends a request; returns the value of the answer, None if the server has none."""
        with self._lock:
            try:
                self._channel.send(pack(*parts))
                answer = self._channel.receive()
            except OSError as error:
                raise CollectiveError(f"the rendezvous of rank 0 is gone: {error}") from error
        if answer[:1] == DONE:
            return answer[1:]
        if answer[:1] != MISSING:
            raise CollectiveError("the rendezvous holds more than it may; a rank writes too much to it")
        return None


def _connected(
    member: Member, address: str, secret: bytes, timeout_seconds: float
) -> tuple[socket.socket, Channel]:
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
                return connection, prove_as_client(connection, secret, member.rank)
            except OSError as error:
                connection.close()
                reason = error
        is_stranger = isinstance(reason, ChannelError) and "," not in ports
        if is_stranger or deadline - time.monotonic() <= 0:
            raise CollectiveError(
                f"rank {member.rank} could not join the rendezvous at {address} within "
                f"{timeout_seconds:g} s: {reason}"
            ) from reason
        # Many strangers at once may have pushed this connection out, or rank 0 is not there yet.
        time.sleep(_PAUSE_SECONDS)
    raise AssertionError("there is always a next port")
