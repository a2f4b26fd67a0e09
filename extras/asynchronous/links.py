"""A worker's connection to one server: function calls to its own server, sockets to other servers."""

from __future__ import annotations

import socket
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

import torch

from ringspark.estimators.collectives.base import CollectiveError
from ringspark.estimators.collectives.rendezvous.channel import prove_as_client
from ringspark.extras.asynchronous import wire
from ringspark.extras.asynchronous.table import Gradients, Groups, ParameterTable, WorkerLeftError

# A server that waits for workers reports their steps, and has its own timeout. After this additional time the
# worker assumes that the server is lost.
_SPARE_SECONDS = 30.0


class OwnLink:
    """Calls the table of this process; has the methods of `RemoteLink`."""

    def __init__(self, table: ParameterTable, worker: int) -> None:
        self._table = table
        self._worker = worker
        self._asked: tuple[Sequence[int] | None, int, int | None] = (None, 0, None)

    def push(self, gradients: Gradients, groups: Groups, *, ends_step: bool) -> int:
        # A copy, because the trainer reuses the memory of its gradients, and the table may keep them.
        own = {index: gradient.clone() for index, gradient in gradients.items()}
        self._table.push(self._worker, own, groups, ends_step=ends_step)
        return 0

    def ask(self, indices: Sequence[int] | None, clock: int, bound: int | None) -> None:
        self._asked = (indices, clock, bound)

    def answer(self, progress: Callable[[], None]) -> list[torch.Tensor]:
        indices, clock, bound = self._asked
        try:
            return self._table.pull(self._worker, indices, clock, bound, progress)
        except WorkerLeftError as error:
            raise CollectiveError(f"the parameter server cannot continue: {error}") from error

    def close(self) -> None:
        return


class RemoteLink:
    """Connection to the server of another rank.

    The methods raise `CollectiveError` if the training has lost a worker.

    Args:
        address: Host and port of the server of rank `server`.
        like: Number of elements and dtype of each slice on that server, by the parameter's index.
    """

    def __init__(
        self,
        server: int,
        address: tuple[str, int],
        token: bytes,
        worker: int,
        like: dict[int, tuple[int, torch.dtype]],
        timeout_seconds: float,
    ) -> None:
        self._server = server
        self._like = like
        self._most = wire.payload_bytes(list(like.values()))
        self._asked: list[int] = []
        try:
            self._connection = socket.create_connection(address, timeout=timeout_seconds)
            try:
                self._connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
                prove_as_client(self._connection, token, worker, timeout_seconds)
            except OSError:
                self._connection.close()
                raise
        except OSError as error:
            raise CollectiveError(
                f"the parameter server of rank {server} cannot be reached: {error}; allow TCP connections "
                "between the hosts of all workers"
            ) from error
        self._connection.settimeout(timeout_seconds + _SPARE_SECONDS)

    def push(self, gradients: Gradients, groups: Groups, *, ends_step: bool) -> int:
        """Sends gradients and the optimizer settings `groups`; returns the bytes sent over the network."""
        header = {"indices": list(gradients), "groups": list(groups), "ends_step": ends_step}
        with self._errors():
            return wire.send(self._connection, wire.PUSH, header, list(gradients.values()))

    def ask(self, indices: Sequence[int] | None, clock: int, bound: int | None) -> None:
        """Starts to pull parameters; takes the arguments of `ParameterTable.pull`."""
        self._asked = list(self._like if indices is None else indices)
        with self._errors():
            wire.send(self._connection, wire.PULL, {"indices": indices, "clock": clock, "bound": bound})

    def answer(self, progress: Callable[[], None]) -> list[torch.Tensor]:
        """Returns the values that `ask` requested; meanwhile calls `progress` as other workers take steps."""
        with self._errors():
            while True:
                kind, header, payload = wire.receive(self._connection, self._most)
                if kind == wire.VALUES:
                    return wire.split_payload(payload, [self._like[index] for index in self._asked])
                if kind == wire.FAILED:
                    raise CollectiveError(f"the parameter server cannot continue: {header['error']}")
                progress()

    def close(self) -> None:
        self._connection.close()

    @contextmanager
    def _errors(self) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            raise CollectiveError(f"the parameter server of rank {self._server} is lost: {error}") from error


ServerLink = OwnLink | RemoteLink
