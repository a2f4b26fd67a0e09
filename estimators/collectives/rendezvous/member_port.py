"""A port that accepts one connection per rank of a run, and closes when all ranks have connected."""

from __future__ import annotations

import asyncio
import socket
import threading
from abc import ABC, abstractmethod
from collections.abc import Collection, Sequence
from contextlib import suppress
from typing import Any

from ringspark.estimators.collectives.rendezvous.channel import (
    ANSWER_BYTES,
    HANDSHAKE_SECONDS,
    Marks,
    check_answer,
    make_hello,
)

# Connections that strangers may hold, in addition to one per rank.
MAX_STRANGERS = 64
# While there is no room, a peer without a proof is disconnected after this time to admit the next one.
_CROWDED_SECONDS = 1.0
# Interval of looking for room, while a connection waits in the queue.
_PAUSE_SECONDS = 0.01


class MemberPort(ABC):
    """Calls `admit` with the connection of each of `ranks`, in the thread `name`, which runs `loop`.

    A peer proves that it knows the secret before anything else is read from it (see `channel`).
    """

    def __init__(
        self, name: str, host: str, secret: bytes, ranks: Collection[int], ports: Sequence[int] = (0,)
    ) -> None:
        self._secret, self._absent = secret, set(ranks)
        self._listener = _listener(host, ports)
        # The system shortens the queue to the length that it allows.
        self._listener.listen(max(len(ranks) + MAX_STRANGERS, socket.SOMAXCONN))
        self._listener.setblocking(False)
        self.port: int = self._listener.getsockname()[1]
        self.loop = asyncio.SelectorEventLoop()
        # Tasks of peers without a proof -> timer that ends the task.
        self._unproved: dict[asyncio.Task[bool], asyncio.TimerHandle] = {}
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)

    @abstractmethod
    def admit(self, rank: int, connection: socket.socket, marks: Marks) -> None:
        """Takes over the connection, which does not block, of a rank that has proved to know the secret."""

    def open(self) -> None:
        self._thread.start()

    def close(self) -> None:
        # At a second call the loop is closed already.
        with suppress(RuntimeError):
            self.loop.call_soon_threadsafe(self.loop.stop)
        self._thread.join(timeout=5)

    def _run(self) -> None:
        self._listen()
        self.loop.run_forever()
        self._close_port()
        while tasks := asyncio.all_tasks(self.loop):
            for task in tasks:
                task.cancel()
            self.loop.run_until_complete(asyncio.wait(tasks))
        self.loop.close()

    def _listen(self) -> None:
        if self._listener.fileno() >= 0:
            self.loop.add_reader(self._listener, self._accept)

    def _close_port(self) -> None:
        if self._listener.fileno() >= 0:
            self.loop.remove_reader(self._listener)
            shut_down(self._listener)

    def _accept(self) -> None:
        try:
            self._make_room()
            connection, _ = self._listener.accept()
        except OSError:
            # No room or no descriptors are left, or the connection broke in the queue; accept again later.
            self.loop.remove_reader(self._listener)
            self.loop.call_later(_PAUSE_SECONDS, self._listen)
            return
        connection.setblocking(False)
        task = self.loop.create_task(self._prove(connection))
        self._unproved[task] = self.loop.call_later(HANDSHAKE_SECONDS, task.cancel)

        def end(task: asyncio.Task[bool]) -> None:
            self._forget(task)
            if task.cancelled() or task.exception() or not task.result():
                shut_down(connection)

        task.add_done_callback(end)

    def _make_room(self) -> None:
        """Ends the oldest connection without a proof if there are too many; OSError if it is too young."""
        if len(self._unproved) >= len(self._absent) + MAX_STRANGERS:
            oldest, deadline = next(iter(self._unproved.items()))
            if deadline.when() - self.loop.time() > HANDSHAKE_SECONDS - _CROWDED_SECONDS:
                raise OSError("all connections are taken")
            self._forget(oldest)
            oldest.cancel()

    def _forget(self, task: Any) -> None:
        if deadline := self._unproved.pop(task, None):
            deadline.cancel()

    async def _prove(self, connection: socket.socket) -> bool:
        """Returns whether the peer is a rank that has not connected yet, after calling `admit`."""
        with suppress(OSError, ValueError):
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            hello = make_hello()
            await self.loop.sock_sendall(connection, hello)
            answer = await self.receive(connection, ANSWER_BYTES)
            proof, marks, rank = check_answer(self._secret, hello, answer)
            await self.loop.sock_sendall(connection, proof)
            if rank in self._absent:
                self.admit(rank, connection, marks)
                self._absent.remove(rank)
                if not self._absent:
                    self._close_port()
                return True
        return False

    async def receive(self, connection: socket.socket, num_bytes: int) -> bytes:
        received = bytearray()
        while len(received) < num_bytes:
            chunk = await self.loop.sock_recv(connection, min(num_bytes - len(received), 1 << 16))
            if not chunk:
                raise ConnectionError("the peer closed the connection")
            received += chunk
        return bytes(received)


def shut_down(connection: socket.socket) -> None:
    # A forked child may hold a copy of the socket, and then close() alone does not end the connection.
    with suppress(OSError):
        connection.shutdown(socket.SHUT_RDWR)
    connection.close()


def _listener(host: str, ports: Sequence[int]) -> socket.socket:
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
