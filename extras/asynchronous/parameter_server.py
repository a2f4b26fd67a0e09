"""A parameter server that is sharded over the workers: every rank trains, and serves one shard.

Li et al. 2014, "Scaling Distributed Machine Learning with the Parameter Server". With a staleness bound of 0,
all workers have the same weights after each step. Otherwise the workers' weights differ until `settle`
makes them equal.
"""

from __future__ import annotations

import secrets
from collections.abc import Mapping, Sequence

import torch
from torch import nn

from ringspark.estimators.collectives import Collective
from ringspark.estimators.collectives.base import gather_bytes
from ringspark.estimators.options.sync import Asynchronous
from ringspark.estimators.parallel.base import GradientSync, MakeOptimizer, SyncSettings, share_weights
from ringspark.estimators.parallel.data.gradient_all_reduce import GradientAllReduce
from ringspark.estimators.parallel.mesh import RankMesh
from ringspark.estimators.parallel.optimizer_state import (
    OptimizerState,
    RootOf,
    check_known,
    first_rank,
)
from ringspark.estimators.parallel.sharded.optimizer_shards import gather_state, load_state
from ringspark.estimators.parallel.sharded.parameter_shards import (
    ShardedParameters,
    check_optimizer,
    flatten_memory,
)
from ringspark.estimators.parallel.sharded.shard_layout import ParameterSlice
from ringspark.extras.asynchronous.client import ParameterClient
from ringspark.extras.asynchronous.links import OwnLink, RemoteLink, ServerLink
from ringspark.extras.asynchronous.server import ShardServer
from ringspark.extras.asynchronous.table import ParameterTable

_TOKEN_BYTES = 32


def open_service(
    table: ParameterTable,
    pieces: Sequence[Mapping[int, ParameterSlice]],
    parameters: Sequence[torch.Tensor],
    settings: torch.optim.Optimizer,
    collective: Collective,
    sync: Asynchronous,
    timeout_seconds: float,
) -> tuple[ShardServer, ParameterClient]:
    """Serves this rank's table, and connects this rank to all servers. Runs on every rank."""
    # Pushes and pulls are no calls of the collective.
    collective.operations.sees_all = False
    rank, size = collective.rank, collective.size
    token = secrets.token_bytes(_TOKEN_BYTES)
    server = ShardServer(table, collective.member.host, token, rank, size)
    collective.on_leave(server.close)
    addresses = gather_bytes(collective, token + f"{server.port} {collective.member.host}".encode())
    links: list[ServerLink] = []
    client = ParameterClient(links, pieces, parameters, settings, sync.bound)
    # Leaving calls the last function first, so connections close before the server waits for its threads.
    collective.on_leave(client.close)
    for other, text in enumerate(addresses):
        if other == rank:
            links.append(OwnLink(table, rank))
            continue
        port, host = text[_TOKEN_BYTES:].decode().split(" ", 1)
        like = {index: (p.stop - p.start, parameters[index].dtype) for index, p in pieces[other].items()}
        links.append(RemoteLink(other, (host, int(port)), text[:_TOKEN_BYTES], rank, like, timeout_seconds))
    return server, client


class ServedSync(GradientSync):
    """Assigns each rank a shard of the parameters, which the rank serves to all workers."""

    def __init__(
        self, module: nn.Module, make_optimizer: MakeOptimizer, collective: Collective, settings: SyncSettings
    ) -> None:
        # The worker's optimizer holds the settings of each step but takes none; the server steps its shard.
        super().__init__(module, make_optimizer(module))
        self._server_optimizer = make_optimizer(module)
        sync, seconds, size = settings.sync, settings.timeout_seconds, collective.size
        assert isinstance(sync, Asynchronous)
        check_optimizer(self._server_optimizer, sync)
        self.optimizer.state.clear()
        self._shard = shard = ShardedParameters(module, self._server_optimizer, collective)
        for tensor in shard.held.values():
            # The server's values differ from the values that the network in this process has read.
            tensor.data = tensor.data.clone()
        held = {piece.index: tensor for piece, tensor in shard.held.items()}
        self.table = ParameterTable(held, self._server_optimizer, size, sync, seconds)
        pieces = [shard.slices_of(rank) for rank in range(size)]
        self._server, self.client = open_service(
            self.table, pieces, shard.parameters, self.optimizer, collective, sync, seconds
        )
        self.in_step = sync.in_step
        # Out of step, a push is the mean gradient of the worker's own rows: see `table`.
        self.loss_factor = 1.0 if self.in_step else float(size)
        self._collective = collective
        self._sent = 0
        self._has_pushed = False
        self._read = self._copy_own()
        # The loss scaler calls this method if it takes the step.
        self.optimizer.step = self._push_and_read  # type: ignore[method-assign, assignment]

    @classmethod
    def prepare(
        cls, module: nn.Module, make_optimizer: MakeOptimizer, mesh: RankMesh, settings: SyncSettings
    ) -> GradientSync:
        if mesh.gradients.size == 1:
            return GradientAllReduce.prepare(module, make_optimizer, mesh, settings)
        share_weights(module, mesh)
        return cls(module, make_optimizer, mesh.gradients, settings)

    def clip_gradients(self, max_norm: float) -> None:
        if not self.in_step:
            # Each push is a separate step, so each worker bounds its own gradient.
            super().clip_gradients(max_norm)
            return
        self.client.progress = self.progress
        self.client.push_and_wait(self._gradients())
        self._has_pushed = True
        # No rank sums before every server has the gradients of every worker.
        self._collective.barrier()
        sums = self.table.sum_step()
        square = torch.zeros(1, dtype=torch.float64)
        for gradient in sums:
            square += gradient.double().square().sum().cpu()
        norm = torch.cat([own.cpu() for own in self._collective.all_gather(square)]).sum().sqrt()
        factor = min(1.0, max_norm / (float(norm) + 1e-6))
        for gradient in sums:
            gradient.mul_(factor)

    def _gradients(self) -> dict[int, torch.Tensor]:
        return {index: p.grad for index, p in enumerate(self._shard.parameters) if p.grad is not None}

    def _push_and_read(self, closure: None = None) -> None:
        self.client.progress = self.progress
        self._send_changes()
        self.client.push_step({} if self._has_pushed else self._gradients())
        self._has_pushed = False
        self.client.read_all()
        self._read = self._copy_own()
        self._count()

    def _copy_own(self) -> dict[int, torch.Tensor]:
        parameters, own = self._shard.parameters, self._shard.slices_of(self._collective.rank)
        return {i: flatten_memory(parameters[i].data)[p.start : p.stop].clone() for i, p in own.items()}

    def _send_changes(self) -> None:
        """Tells this rank's server how callbacks changed the rank's slices since the last read."""
        now = self._copy_own()
        changed = {i: (before, now[i]) for i, before in self._read.items() if not before.equal(now[i])}
        if changed:
            self.table.move(changed)

    def settle(self) -> None:
        # In step, all ranks read the same weights after the last step.
        if not self.in_step:
            self.client.progress = self.progress
            self.client.await_all()
            self._send_changes()
            # No rank reads before every server has the changes.
            self._collective.barrier()
            self.client.pull_all(bound=0)
            self._read = self._copy_own()
        # No rank pushes the next step before all have read, so that all bytes are counted.
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
        # No rank reads or pushes before every server has its values.
        self._collective.barrier()

    def optimizer_state(self, root_of: RootOf = first_rank) -> OptimizerState:
        return gather_state(self._shard, self._server_optimizer, root_of)

    def load_optimizer_state(self, state: OptimizerState) -> None:
        check_known(state, self._shard.names)
        load_state(self._shard, self._server_optimizer, state)
