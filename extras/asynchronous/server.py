"""Serves one rank's `ParameterTable` to the other workers, in threads of the rank's process.

Each worker has one connection, so a pull sees the worker's own earlier pushes. A peer that does not know the
run's token is disconnected. When a connection ends, its worker counts as gone.
"""

from __future__ import annotations

import socket
import threading
import time
from contextlib import suppress

from ringspark.estimators.collectives.rendezvous.channel import (
    ANSWER_BYTES,
    HANDSHAKE_SECONDS,
    check_answer,
    make_hello,
    read_exactly,
)
from ringspark.estimators.collectives.rendezvous.server import CROWDED_SECONDS, MAX_STRANGERS
from ringspark.extras.asynchronous import wire
from ringspark.extras.asynchronous.table import ParameterTable, WorkerLeftError

_ACCEPT_SECONDS = 0.5
# Interval of looking for room, while new connections wait in the system's queue.
_PAUSE_SECONDS = 0.01
# Smallest interval of progress messages, in seconds: a worker that waits for thousands of steps on one
# server does not read the messages of other servers.
_NOTICE_SECONDS = 0.1


class ShardServer:
    """Serves a table until `close`.

    Args:
        host: Address to bind to.
        token: Secret that the workers of this training share.
        rank: Rank of the worker in this process, which uses the table directly.
    """

    def __init__(self, table: ParameterTable, host: str, token: bytes, rank: int, size: int) -> None:
        self._table = table
        self._token = token
        self._expected = set(range(size)) - {rank}
        self._lock = threading.Lock()
        # Connection without a proof -> time at which it was accepted.
        self._unproved: dict[socket.socket, float] = {}
        self._workers: dict[int, socket.socket] = {}
        self._threads: list[threading.Thread] = []
        self._sent = 0
        self._closed = False
        family, *_, address = socket.getaddrinfo(host, 0, type=socket.SOCK_STREAM)[0]
        backlog = max(size + MAX_STRANGERS, socket.SOMAXCONN)
        self._listener = socket.create_server(address, family=family, backlog=backlog)
        self.port: int = self._listener.getsockname()[1]
        # The timeout wakes the accepting thread; closing the listener alone would not.
        self._listener.settimeout(_ACCEPT_SECONDS)
        self._accepting = threading.Thread(target=self._accept, name="ringspark-parameter-port", daemon=True)
        self._accepting.start()

    def take_sent(self) -> int:
        with self._lock:
            sent, self._sent = self._sent, 0
        return sent

    def close(self) -> None:
        with self._lock:
            self._closed = True
            connections = [*self._unproved, *self._workers.values()]
        self._close_port()
        # Wake threads that wait in the table.
        for worker in self._expected:
            self._table.leave(worker)
        for connection in connections:
            with suppress(OSError):
                connection.shutdown(socket.SHUT_RDWR)
        self._accepting.join(timeout=5)
        with self._lock:
            threads = [*self._threads]
        for thread in threads:
            thread.join(timeout=5)

    def _close_port(self) -> None:
        with suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()

    def _accept(self) -> None:
        while True:
            with self._lock:
                if self._closed or self._expected <= set(self._workers):
                    break
                has_room = self._has_room()
            if not has_room:
                time.sleep(_PAUSE_SECONDS)
                continue
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

    def _has_room(self) -> bool:
        """Returns whether there is room for another connection.

        If there is none, it disconnects the oldest peer that has not proved that it knows the token, once the
        peer has been connected for `CROWDED_SECONDS`.
        """
        if len(self._unproved) + len(self._workers) < len(self._expected) + MAX_STRANGERS:
            return True
        oldest, since = next(iter(self._unproved.items()))
        if time.monotonic() - since < CROWDED_SECONDS:
            return False
        del self._unproved[oldest]
        with suppress(OSError):
            oldest.shutdown(socket.SHUT_RDWR)
        return True

    def _begin(self, connection: socket.socket) -> None:
        with self._lock:
            if self._closed:
                connection.close()
                return
            self._unproved[connection] = time.monotonic()
            thread = threading.Thread(
                target=self._serve, args=(connection,), name="ringspark-parameter-server", daemon=True
            )
            self._threads = [other for other in self._threads if other.is_alive()] + [thread]
            thread.start()

    def _serve(self, connection: socket.socket) -> None:
        with connection:
            try:
                connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
                worker = _admit(connection, self._token)
            except OSError:
                return
            finally:
                with self._lock:
                    self._unproved.pop(connection, None)
            with self._lock:
                if self._closed or worker not in self._expected or worker in self._workers:
                    return
                self._workers[worker] = connection
                is_complete = self._expected <= set(self._workers)
            if is_complete:
                self._close_port()
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


def _admit(connection: socket.socket, secret: bytes) -> int:
    """Accepts a client that knows the secret; returns its rank."""
    deadline = time.monotonic() + HANDSHAKE_SECONDS
    connection.settimeout(HANDSHAKE_SECONDS)
    hello = make_hello()
    connection.sendall(hello)
    proof, _, rank = check_answer(secret, hello, read_exactly(connection, ANSWER_BYTES, deadline))
    connection.sendall(proof)
    connection.settimeout(None)
    return rank
