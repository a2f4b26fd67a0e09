"""The meeting point of a gang: a key-value server in rank 0's process, for members only.

Horovod's own server is plain HTTP, and torch's `TCPStore` has no authentication either: whoever reaches the
port can read and write the addresses that the ranks exchange. Here a peer proves that it knows the run's
secret before anything is read from it (see `channel`). The server is bound to the member's own address, and
its port is closed as soon as every rank has come; after that it serves only their connections.

Messages are packed byte strings (see `pack`); nothing is unpickled.
"""

from __future__ import annotations

import hashlib
import hmac
import socket
import struct
import threading
import time
from collections.abc import Sequence
from contextlib import suppress

from ringspark.estimators.collectives.rendezvous.channel import prove_as_server

# The most peers at a time that have not yet proved themselves. One more pushes out the oldest of them.
MAX_UNPROVED = 64
# The longest time, in seconds, that a request waits at the server; then the client asks again.
MAX_WAIT_SECONDS = 1.0
MAX_STORED_BYTES = 64 << 20

# Prefix, before the rank's number, of the key for the address from which rank 0 saw the rank come.
SEEN = "seen/"

DONE, MISSING, REFUSED = b"\x00", b"\x01", b"\x02"

# The ports at which a gang meets that was told none: below those that systems give to outgoing connections.
_PORTS = range(10_000, 32_000)
_NUM_PORTS = 8


def meeting_ports(secret: bytes) -> list[int]:
    """Returns the ports at which the ranks of one host meet without having been told one.

    Every rank derives the same ones from the secret, which is new with each start of the gang, and no
    stranger can. Rank 0 takes the first that is free.
    """
    digest = hmac.new(secret, b"ports", hashlib.sha256).digest()
    return [_PORTS[number % len(_PORTS)] for number in struct.unpack(f"!{_NUM_PORTS}I", digest)]


def pack(*parts: bytes) -> bytes:
    """Joins byte strings end to end, each after its length."""
    return b"".join(struct.pack("!I", len(part)) + part for part in parts)


def unpack(message: bytes) -> list[bytes]:
    """Returns the byte strings that `pack` joined.

    Raises:
        ValueError: The message was not made by `pack`.
    """
    parts, at = [], 0
    while at < len(message):
        if at + 4 > len(message):
            raise ValueError("a message ends inside a length")
        (length,) = struct.unpack_from("!I", message, at)
        at += 4
        if at + length > len(message):
            raise ValueError(f"a part of {length} bytes was announced, {len(message) - at} are left")
        parts.append(message[at : at + length])
        at += length
    return parts


class KeyValues:
    """The keys and values of one run; threads may share it and wait for keys."""

    def __init__(self) -> None:
        self._values: dict[bytes, bytes] = {}
        self._num_bytes = 0
        self._changed = threading.Condition()

    def answer(self, message: bytes) -> bytes:
        """Runs one request, which is its name and then its arguments.

        Raises:
            ValueError: The message is not a request.
        """
        name, *args = unpack(message) or [b""]
        known = {b"set": 2, b"get": 1, b"add": 2, b"swap": 3, b"delete": 1}
        if name == b"wait" and args:
            return DONE if self._wait(args[1:], _number(args[0]) / 1000) else MISSING
        if known.get(name) != len(args):
            raise ValueError(f"no request {name[:20]!r} with {len(args)} arguments")
        with self._changed:
            if name == b"get":
                value = self._values.get(args[0])
                return MISSING if value is None else DONE + value
            if name == b"delete":
                old = self._values.pop(args[0], None)
                self._num_bytes -= 0 if old is None else len(args[0]) + len(old)
                return MISSING if old is None else DONE
            if name == b"add":
                total = _number(self._values.get(args[0], b"0")) + _number(args[1])
                return self._set(args[0], str(total).encode())
            if name == b"swap":
                key, expected, desired = args
                found = self._values.get(key)
                # As in torch's stores, an empty expected value also matches a missing key.
                if found == expected or (found is None and not expected):
                    return self._set(key, desired)
                return DONE + (expected if found is None else found)
            return self._set(*args)

    def _set(self, key: bytes, value: bytes) -> bytes:
        old = self._values.get(key)
        grown = len(value) - len(old) if old is not None else len(key) + len(value)
        if self._num_bytes + grown > MAX_STORED_BYTES:
            return REFUSED
        self._num_bytes += grown
        self._values[key] = value
        self._changed.notify_all()
        return DONE + value

    def _wait(self, keys: Sequence[bytes], seconds: float) -> bool:
        seconds = min(max(seconds, 0.0), MAX_WAIT_SECONDS)
        with self._changed:
            return self._changed.wait_for(lambda: all(key in self._values for key in keys), seconds)


class RendezvousServer:
    """Serves until `close`; the port itself is closed once ranks 0 to `size - 1` have come.

    Args:
        host: The address to bind to: that of the member which opens the rendezvous.
        size: Number of ranks in the gang.
        secret: Secret of the run.
        ports: Ports of which it takes the first free one; by default the host chooses one.
    """

    def __init__(self, host: str, size: int, secret: bytes, ports: Sequence[int] = (0,)) -> None:
        self._size = size
        self._secret = secret
        self._store = KeyValues()
        self._lock = threading.Lock()
        self._unproved: dict[socket.socket, None] = {}
        self._members: dict[int, socket.socket] = {}
        self._threads: set[threading.Thread] = set()
        self._listener = _listener(host, ports)
        self._listener.listen(size + MAX_UNPROVED)
        self.address = f"{host}:{self._listener.getsockname()[1]}"
        # The timeout wakes the accepting thread; closing the listener alone would not.
        self._listener.settimeout(0.5)
        self._closed = False
        self._accepting = threading.Thread(target=self._accept, name="ringspark-rendezvous", daemon=True)
        self._accepting.start()

    def close(self) -> None:
        """Ends all connections and frees the port."""
        with self._lock:
            self._closed = True
            connections = [*self._unproved, *self._members.values()]
        self._close_port()
        for connection in connections:
            _end(connection)
        self._accepting.join(timeout=5)
        with self._lock:
            threads = [*self._threads]
        for thread in threads:
            thread.join(timeout=5)

    def _close_port(self) -> None:
        # This wakes an accept that is under way; if it does not, the listener's timeout will.
        with suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()

    def _accept(self) -> None:
        while True:
            with self._lock:
                if self._closed or len(self._members) == self._size:
                    break
            try:
                connection, _ = self._listener.accept()
            except TimeoutError:
                continue
            except OSError:
                if self._listener.fileno() < 0:
                    break
                # No descriptors are left, or a connection broke while it waited; the next may succeed.
                time.sleep(0.01)
                continue
            self._begin(connection)
        self._close_port()

    def _begin(self, connection: socket.socket) -> None:
        with self._lock:
            if self._closed:
                _end(connection)
                return
            if len(self._unproved) >= MAX_UNPROVED:
                # The oldest goes instead of this one: a member needs milliseconds, an old one is a stranger.
                oldest = next(iter(self._unproved))
                del self._unproved[oldest]
                _end(oldest)
            self._unproved[connection] = None
            thread = threading.Thread(
                target=self._serve, args=(connection,), name="ringspark-rendezvous-peer", daemon=True
            )
            self._threads = {other for other in self._threads if other.is_alive()} | {thread}
        thread.start()

    def _serve(self, connection: socket.socket) -> None:
        """Serves one peer, from its proof to the end of its connection."""
        # Whatever a peer does, it can end only its own connection.
        with suppress(OSError, ValueError), connection:
            try:
                connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
                channel, rank = prove_as_server(connection, self._secret)
            finally:
                with self._lock:
                    self._unproved.pop(connection, None)
            with self._lock:
                if self._closed or rank >= self._size or rank in self._members:
                    return
                self._members[rank] = connection
                is_complete = len(self._members) == self._size
            seen = connection.getpeername()[0].encode()
            self._store.answer(pack(b"set", f"{SEEN}{rank}".encode(), seen))
            if is_complete:
                self._close_port()
            while True:
                channel.send(self._store.answer(channel.receive()))


def _listener(host: str, ports: Sequence[int]) -> socket.socket:
    """Returns a socket that is bound to the first port that nobody has."""
    family, *_, (address, _, *scope) = socket.getaddrinfo(host, 0, type=socket.SOCK_STREAM)[0]
    for port in ports:
        listener = socket.socket(family, socket.SOCK_STREAM)
        try:
            listener.bind((address, port, *scope))
            return listener
        except OSError as error:
            listener.close()
            refused = error
    raise refused


def _end(connection: socket.socket) -> None:
    """Ends a connection that another thread reads from; that thread closes it."""
    with suppress(OSError):
        connection.shutdown(socket.SHUT_RDWR)


def _number(text: bytes) -> int:
    if len(text) > 20:
        raise ValueError(f"a number of {len(text)} digits")
    return int(text)
