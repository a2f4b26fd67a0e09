"""The rendezvous of a gang: a key-value server in rank 0's process, for members only.

A peer proves that it knows the run's secret before anything else is read from it (see `channel`). The port is
closed once every rank has connected. One thread serves all connections; nothing is unpickled.
"""

from __future__ import annotations

import asyncio
import hashlib
import hmac
import socket
import struct
import zlib
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import partial

from ringspark.estimators.collectives.rendezvous import own_sockets
from ringspark.estimators.collectives.rendezvous.channel import LENGTH_BYTES, Marks, rest_bytes
from ringspark.estimators.collectives.rendezvous.member_port import MemberPort, shut_down

# The longest time, in seconds, that a request waits at the server; then the client asks again.
MAX_WAIT_SECONDS = 10.0
MAX_STORED_BYTES = 64 << 20
# An answer names at most this many missing ranks.
_SHOWN = 8

# Prefix, before the rank's number, of the key for the address from which rank 0 saw the rank come.
SEEN = "seen/"

DONE, MISSING, REFUSED = b"\x00", b"\x01", b"\x02"
# A request begins with a number that the client chooses; its answer begins with the same number.
NUMBER_BYTES = 4

Reply = Callable[[bytes], None]

# Ports for a gang without a known port: below the ports of outgoing connections.
_PORTS = range(10_000, 32_000)
_NUM_PORTS = 8


def rendezvous_ports(secret: bytes) -> list[int]:
    """Returns ports derived from the secret; the ranks of one host try them if rank 0's port is unknown."""
    digest = hmac.new(secret, b"ports", hashlib.sha256).digest()
    return [_PORTS[number % len(_PORTS)] for number in struct.unpack(f"!{_NUM_PORTS}I", digest)]


def pack(*parts: bytes) -> bytes:
    """Joins byte strings end to end, each after its length."""
    return b"".join(struct.pack("!I", len(part)) + part for part in parts)


def unpack(message: bytes) -> list[bytes]:
    """Returns the byte strings that `pack` joined; refuses other messages."""
    parts, at = [], 0
    while at < len(message):
        if at + 4 > len(message):
            raise ValueError("a message ends inside a length")
        (length,) = struct.unpack_from("!I", message, at)
        at += 4
        if at + length > len(message):
            raise ValueError(f"a message has {len(message) - at} bytes left for a string of {length} bytes")
        parts.append(message[at : at + length])
        at += length
    return parts


class KeyValues:
    """Key-value store of one run. Only the thread that runs the event loop `loop` may use the store."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop
        self._values: dict[bytes, bytes] = {}
        self._num_bytes = 0
        # Key -> functions to call once the key exists.
        self._waiting: dict[bytes, set[Callable[[], None]]] = {}
        # Name of a synchronization -> ranks that have not called it yet; then rank -> its answer.
        self._synchronizations: dict[bytes, tuple[set[int], dict[int, bytes]]] = {}

    def answer(self, message: bytes, reply: Reply) -> None:
        """Runs one request, joined by `pack`; calls `reply` once, now or later."""
        name, *args = unpack(message) or [b""]
        known = {b"set": 2, b"get": 2, b"all": 5, b"parts": 5, b"add": 2, b"delete": 1}
        if known.get(name) != len(args):
            raise ValueError(f"there is no request {name[:20]!r} with {len(args)} arguments")
        key = args[0]
        if name == b"get":
            self._when(key, _number(args[1]), lambda: reply(self._found(key)))
        elif name in (b"all", b"parts"):
            self._meet(name == b"parts", args, reply)
        elif name == b"delete":
            reply(MISSING if self._pop(key) is None else DONE)
        elif name == b"add":
            total = _number(self._values.get(key, b"0")) + _number(args[1])
            reply(self.set(key, str(total).encode()))
        else:
            reply(self.set(*args))

    def set(self, key: bytes, value: bytes) -> bytes:
        old = self._values.get(key)
        grown = len(value) - len(old) if old is not None else len(key) + len(value)
        if self._num_bytes + grown > MAX_STORED_BYTES:
            return REFUSED
        self._num_bytes += grown
        self._values[key] = value
        for wake in self._waiting.pop(key, ()):
            wake()
        return DONE + value

    def _pop(self, key: bytes) -> bytes | None:
        value = self._values.pop(key, None)
        self._num_bytes -= 0 if value is None else len(key) + len(value)
        return value

    def _found(self, key: bytes) -> bytes:
        value = self._values.get(key)
        return MISSING if value is None else DONE + value

    def _when(self, key: bytes, wait_ms: int, then: Callable[[], None]) -> None:
        if key in self._values or wait_ms <= 0:
            then()
            return

        def wake() -> None:
            timer.cancel()
            then()

        def give_up() -> None:
            waiting = self._waiting[key]
            waiting.remove(wake)
            if not waiting:
                del self._waiting[key]
            then()

        timer = self._loop.call_later(min(wait_ms / 1000, MAX_WAIT_SECONDS), give_up)
        self._waiting.setdefault(key, set()).add(wake)

    def _meet(self, in_parts: bool, args: Sequence[bytes], reply: Reply) -> None:
        """Registers a rank; replies once all ranks are registered, with all values or the parts for the rank.

        After `wait_ms`, replies with the number of missing ranks; if `wait_ms` is 0, also names some of them.
        """
        name, value = args[0], args[3]
        size, rank, wait_ms = map(_number, (args[1], args[2], args[4]))
        if name not in self._synchronizations:
            self._synchronizations[name] = set(range(size)), {}
        (missing, answers), complete = self._synchronizations[name], name + b"/all"
        # A rank repeats its request while it waits, and is registered only once.
        if rank in missing:
            if self.set(b"%s/%d" % (name, rank), value) == REFUSED:
                reply(REFUSED)
                return
            missing.remove(rank)
            if not missing:
                values = [self._pop(b"%s/%d" % (name, other)) or b"" for other in range(size)]
                # Compressed once for all ranks: addresses, for example, hardly differ.
                shares = _parts(values) if in_parts else [zlib.compress(pack(*values))] * size
                answers.update(enumerate(shares))
                self.set(complete, b"")

        def end() -> None:
            if missing:
                shown = sorted(missing)[:_SHOWN] if wait_ms <= 0 else []
                reply(MISSING + pack(*(str(number).encode() for number in (len(missing), *shown))))
            else:
                reply(DONE + answers.pop(rank, b""))
                if not answers:
                    self._pop(complete)
                    del self._synchronizations[name]

        self._when(complete, wait_ms, end)


def _parts(values: Sequence[bytes]) -> list[bytes]:
    """Returns each rank's parts; a value has an equal part for each rank."""
    joined = [zlib.decompress(value) for value in values]
    width = len(joined[0]) // len(joined)
    begins = range(0, width * len(joined), width)
    return [zlib.compress(b"".join(each[at : at + width] for each in joined)) for at in begins]


class RendezvousServer(MemberPort):
    """Serves until `close`; accepts no more connections once ranks 0 to `size - 1` have connected."""

    def __init__(self, host: str, size: int, secret: bytes, ports: Sequence[int] = (0,)) -> None:
        own_sockets.allow_sockets(size)
        super().__init__("ringspark-rendezvous", host, secret, range(size), ports)
        self.address = f"{host}:{self.port}"
        self._store = KeyValues(self.loop)
        self.open()

    def admit(self, rank: int, connection: socket.socket, marks: Marks) -> None:
        self._store.set(f"{SEEN}{rank}".encode(), connection.getpeername()[0].encode())
        task = self.loop.create_task(self._serve(connection, marks))
        task.add_done_callback(lambda _: shut_down(connection))

    async def _serve(self, connection: socket.socket, marks: Marks) -> None:
        """Serves one rank; bad input from it ends only this connection."""
        frames: asyncio.Queue[bytes] = asyncio.Queue()

        def reply(number: bytes, answer: bytes) -> None:
            try:
                frame = marks.seal(number + answer)
            except ValueError:
                # The answer is too long. Another peer's request may have triggered it, and must not fail.
                frame = marks.seal(number + REFUSED)
            frames.put_nowait(frame)

        async def send() -> None:
            with suppress(OSError):  # the reader notices, too
                while True:
                    await self.loop.sock_sendall(connection, await frames.get())

        sending = self.loop.create_task(send())
        try:
            with suppress(OSError, ValueError, zlib.error):
                while True:
                    length = await self.receive(connection, LENGTH_BYTES)
                    message = marks.open(length, await self.receive(connection, rest_bytes(length)))
                    self._store.answer(message[NUMBER_BYTES:], partial(reply, message[:NUMBER_BYTES]))
        finally:
            sending.cancel()


def _number(text: bytes) -> int:
    if len(text) > 20:
        raise ValueError(f"a number may have at most 20 digits, got {len(text)}")
    return int(text)
