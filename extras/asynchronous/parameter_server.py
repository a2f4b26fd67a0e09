"""A parameter server whose shards stand beside the workers: every rank is a worker and serves its part.

Li et al. 2014, "Scaling Distributed Machine Learning with the Parameter Server". A step pushes the gradients
to the servers, which step the optimizer, and pulls the weights, as new as the consistency promises. So the
rank's copy is what it has read last.

Under a bound of 0 the training is that of data parallelism: all copies are equal after each step. Otherwise
they differ until `settle`, which waits for the pushes of all ranks and reads the same weights on all.
"""

from __future__ import annotations

import secrets
from collections.abc import Mapping, Sequence
from functools import partial

import torch
from torch import nn

from ringspark.estimators.collectives import Collective
from ringspark.estimators.collectives.base import gather_bytes
from ringspark.estimators.options.sync import Asynchronous
from ringspark.estimators.parallel.base import GradientSync, MakeOptimizer, PlainSync, Scaler
from ringspark.estimators.parallel.data.data_parallel import DataParallel
from ringspark.estimators.parallel.exchange import Exchange
from ringspark.estimators.parallel.optimizer_state import OptimizerState, check_known
from ringspark.estimators.parallel.sharded.piece_state import gather_state, load_state
from ringspark.estimators.parallel.sharded.pieces import Shard, check_optimizer, flat
from ringspark.estimators.parallel.sharded.shard_layout import Piece
from ringspark.extras.asynchronous.client import ParameterClient
from ringspark.extras.asynchronous.links import Link, OwnLink, RemoteLink
from ringspark.extras.asynchronous.server import ShardServer
from ringspark.extras.asynchronous.table import Table

_TOKEN_BYTES = 32


class ParameterServerStrategy:
    """Deals the parameters out to servers on all ranks; for any `Asynchronous` except Hogwild."""

    def prepare(
        self, module: nn.Module, make_optimizer: MakeOptimizer, collective: Collective, exchange: Exchange
    ) -> GradientSync:
        if collective.size == 1:
            return DataParallel().prepare(module, make_optimizer, collective, exchange)
        with torch.no_grad():
            collective.broadcast(list(module.state_dict().values()))
        # The worker's own holds the settings of each step, and takes none; the server's is cut to its shard.
        settings, optimizer = make_optimizer(module), make_optimizer(module)
        check_optimizer(optimizer, exchange.sync)
        settings.state.clear()
        shard = Shard(module, optimizer, collective)
        for tensor in shard.held.values():
            # The server's values are not those that the network beside it has read last.
            tensor.data = tensor.data.clone()
        assert isinstance(exchange.sync, Asynchronous)
        table = Table(
            {piece.index: tensor for piece, tensor in shard.held.items()},
            optimizer,
            collective.size,
            exchange.sync,
            exchange.timeout_seconds,
        )
        pieces = [shard.pieces_of(rank) for rank in range(collective.size)]
        server, client = open_service(
            table, pieces, shard.parameters, settings, collective, exchange.sync, exchange.timeout_seconds
        )
        return ServedSync(module, settings, shard, optimizer, table, server, client, collective)


def open_service(
    table: Table,
    pieces: Sequence[Mapping[int, Piece]],
    parameters: Sequence[torch.Tensor],
    settings: torch.optim.Optimizer,
    collective: Collective,
    sync: Asynchronous,
    timeout_seconds: float,
) -> tuple[ShardServer, ParameterClient]:
    """Serves this rank's table, and connects this rank to all others'. Runs on every rank.

    The addresses travel over the collective, whose ranks know each other; so does each server's token, which
    a peer must prove to know.
    """
    # The pushes and reads of a step are no calls of the collective.
    collective.operations.sees_all = False
    rank, size = collective.rank, collective.size
    token = secrets.token_bytes(_TOKEN_BYTES)
    server = ShardServer(table, collective.member.host, token, rank, size)
    collective.on_leave(server.close)
    told = gather_bytes(collective, token + f"{server.port} {collective.member.host}".encode())
    links: list[Link] = []
    # Leaving calls the last function first: the connections close before the server waits for its threads.
    collective.on_leave(partial(_close, links))
    for other, text in enumerate(told):
        if other == rank:
            links.append(OwnLink(table, rank))
            continue
        port, host = text[_TOKEN_BYTES:].decode().split(" ", 1)
        like = {index: (p.stop - p.start, parameters[index].dtype) for index, p in pieces[other].items()}
        links.append(RemoteLink(other, (host, int(port)), text[:_TOKEN_BYTES], rank, like, timeout_seconds))
    return server, ParameterClient(links, pieces, parameters, settings, sync.bound)


def _close(links: list[Link]) -> None:
    for link in links:
        link.close()


class ServedSync(PlainSync):
    """Pushes the gradients of a step, and reads the weights for the next one."""

    def __init__(
        self,
        network: nn.Module,
        settings: torch.optim.Optimizer,
        shard: Shard,
        optimizer: torch.optim.Optimizer,
        table: Table,
        server: ShardServer,
        client: ParameterClient,
        collective: Collective,
    ) -> None:
        """Takes the parts that `ParameterServer.prepare` made.

        Args:
            settings: Optimizer over the network's own parameters; only the settings of its groups are used.
            optimizer: Optimizer of this rank's shard.
        """
        super().__init__(network, settings)
        self.client = client
        self.table = table
        self.in_step = client.is_in_step
        # Out of step, a push is the mean gradient of the worker's own rows: see `server.table`.
        self.loss_factor = 1.0 if self.in_step else float(collective.size)
        self._shard = shard
        self._server_optimizer = optimizer
        self._server = server
        self._collective = collective
        self._sent = 0
        self._read = self._copy_own()
        # Whoever decides whether a step is taken calls this one.
        settings.step = self._push_and_read  # type: ignore[method-assign, assignment]

    def step(self, scaler: Scaler) -> None:
        scaler.step(self.optimizer)

    def _push_and_read(self, closure: None = None) -> None:
        self.client.progress = self.progress
        self._send_changes()
        named = enumerate(self._shard.parameters)
        self.client.push_step({index: p.grad for index, p in named if p.grad is not None})
        self.client.read_all()
        self._read = self._copy_own()
        self._count()

    def _own_pieces(self) -> dict[int, torch.Tensor]:
        """Returns views of the elements of this rank's network that its own server holds."""
        parameters = self._shard.parameters
        own = self._shard.pieces_of(self._collective.rank)
        return {i: flat(parameters[i].data)[piece.start : piece.stop] for i, piece in own.items()}

    def _copy_own(self) -> dict[int, torch.Tensor]:
        return {index: values.clone() for index, values in self._own_pieces().items()}

    def _send_changes(self) -> None:
        """Sends this rank's server the changes that callbacks made to the weights since the last read."""
        now = self._copy_own()
        changed = {i: (before, now[i]) for i, before in self._read.items() if not before.equal(now[i])}
        if changed:
            self.table.move(changed)

    def settle(self) -> None:
        # In step, what was read after the last step is the same on all ranks.
        if not self.in_step:
            self.client.progress = self.progress
            self.client.await_all()
            self._send_changes()
            # No rank reads before every server has the changes.
            self._collective.barrier()
            self.client.pull_all(bound=0)
            self._read = self._copy_own()
        # Nobody pushes the next step before all have read; what they were sent is counted.
        self._collective.barrier()
        self._count()

    def _count(self) -> None:
        sent = self.client.bytes_sent
        self._collective.traffic.bytes_sent += sent - self._sent + self._server.take_sent()
        self._sent = sent

    def rank_state(self) -> dict[str, torch.Tensor]:
        self.settle()
        return {}

    def load_rank_states(self, states: Sequence[Mapping[str, torch.Tensor]], *, is_same: bool) -> None:
        self._read = self._copy_own()
        self.table.load(self._read)
        # Nobody reads or pushes before every server has its values.
        self._collective.barrier()

    def optimizer_state(self) -> OptimizerState:
        return gather_state(self._shard, self._server_optimizer)

    def load_optimizer_state(self, state: OptimizerState) -> None:
        check_known(state, self._shard.names)
        load_state(self._shard, self._server_optimizer, state)
