"""Serves one rank's `ParameterTable` to the other workers, in threads of the rank's process.

Each worker has one connection, so a pull sees the worker's own earlier pushes. A peer that does not know the
run's token is disconnected. When a connection ends, its worker counts as gone.
"""

from __future__ import annotations

import socket
import threading
import time
from contextlib import suppress

from ringspark.estimators.collectives.rendezvous.channel import Marks
from ringspark.estimators.collectives.rendezvous.member_port import MemberPort
from ringspark.extras.asynchronous import wire
from ringspark.extras.asynchronous.table import ParameterTable, WorkerLeftError

# Smallest interval of progress messages, in seconds: a worker that waits for thousands of steps on one
# server does not read the messages of other servers.
_NOTICE_SECONDS = 0.1


class ShardServer(MemberPort):
    """Serves a table until `close`.

    Args:
        host: Address to bind to.
        token: Secret that the workers of this training share.
        rank: Rank of the worker in this process, which uses the table directly.
    """

    def __init__(self, table: ParameterTable, host: str, token: bytes, rank: int, size: int) -> None:
        self._workers = set(range(size)) - {rank}
        super().__init__("ringspark-parameter-port", host, token, self._workers)
        self._table = table
        self._connections: list[socket.socket] = []
        self._threads: list[threading.Thread] = []
        self._lock = threading.Lock()
        self._sent = 0
        self.open()

    def take_sent(self) -> int:
        with self._lock:
            sent, self._sent = self._sent, 0
        return sent

    def close(self) -> None:
        super().close()
        # Before the table wakes their threads, which would name a wrong rank to the workers.
        for connection in self._connections:
            with suppress(OSError):
                connection.shutdown(socket.SHUT_RDWR)
        for worker in self._workers:
            self._table.leave(worker)
        for thread in self._threads:
            thread.join(timeout=5)

    def admit(self, rank: int, connection: socket.socket, marks: Marks) -> None:
        connection.setblocking(True)
        thread = threading.Thread(
            target=self._serve, args=(rank, connection), name="ringspark-parameter-server", daemon=True
        )
        self._connections.append(connection)
        self._threads.append(thread)
        thread.start()

    def _serve(self, worker: int, connection: socket.socket) -> None:
        # The table marks the worker as gone before the connection closes.
        with connection:
            try:
                # A bad message of a peer only ends its own connection.
                with suppress(OSError, ValueError, KeyError, TypeError):
                    self._work_for(worker, connection)
            finally:
                self._table.leave(worker)

    def _work_for(self, worker: int, connection: socket.socket) -> None:
        held = self._table.held
        like = {index: (tensor.numel(), tensor.dtype) for index, tensor in held.items()}
        most = wire.payload_bytes(list(like.values()))

        noticed = 0.0

        def notice() -> None:
            nonlocal noticed
            if time.monotonic() - noticed >= _NOTICE_SECONDS:
                noticed = time.monotonic()
                wire.send(connection, wire.PROGRESS, {})

        while True:
            kind, header, payload = wire.receive(connection, most)
            if kind == wire.PUSH:
                indices: list[int] = header["indices"]
                gradients = wire.split_payload(payload, [like[index] for index in indices])
                # JSON has no tuples, which torch's optimizers need.
                groups = [
                    {key: tuple(value) if isinstance(value, list) else value for key, value in group.items()}
                    for group in header["groups"]
                ]
                own = dict(zip(indices, gradients, strict=True))
                self._table.push(worker, own, groups, ends_step=header["ends_step"])
                continue
            try:
                values = self._table.pull(worker, header["indices"], header["clock"], header["bound"], notice)
            except WorkerLeftError as error:
                wire.send(connection, wire.FAILED, {"error": str(error)})
                return
            except Exception as error:
                if error is not self._table.failure:
                    raise  # a bad request of the peer
                text = f"the optimizer failed: {type(error).__name__}: {error}"
                wire.send(connection, wire.FAILED, {"error": text})
                return
            with self._lock:
                # Count before sending, so that a rank that knows of their arrival counts them.
                self._sent += wire.payload_bytes([(value.numel(), value.dtype) for value in values])
            wire.send(connection, wire.VALUES, {}, values)
