"""Hogwild: the ranks of one host train the same weights in shared memory, without a lock.

Recht et al. 2011, "Hogwild!: A Lock-Free Approach to Parallelizing Stochastic Gradient Descent". If two ranks
write the same element at the same time, one update may be lost. A rank's step uses the mean gradient of its
own rows, and the learning rate is divided by the number of ranks. Each rank also runs a `ShardServer` without
parameters, which only counts the ranks' steps.
"""

from __future__ import annotations

import mmap
import os
from collections.abc import Mapping, Sequence
from contextlib import ExitStack, suppress
from functools import partial

import torch
from torch import nn

from ringspark.estimators.collectives import Collective
from ringspark.estimators.collectives.base import gather_bytes
from ringspark.estimators.collectives.shared_memory import meet_on_host, receive_descriptors, send_descriptors
from ringspark.estimators.options.sync import Hogwild
from ringspark.estimators.parallel.base import (
    GradientSync,
    MakeOptimizer,
    Scaler,
    SyncSettings,
    share_weights,
)
from ringspark.estimators.parallel.data.gradient_all_reduce import GradientAllReduce
from ringspark.estimators.parallel.mesh import RankMesh
from ringspark.estimators.parallel.sharded.parameter_shards import is_dense, view_at
from ringspark.estimators.parallel.sharded.shard_layout import ParameterSlice
from ringspark.extras.asynchronous.parameter_server import open_service
from ringspark.extras.asynchronous.table import ParameterTable
from ringspark.extras.local_sgd.rank_optimizer import load_tensors, state_tensors

# Every parameter starts at its own cache line.
_ALIGNMENT = 64
_REMEDY = "set sync=ParameterServer(), which uses the network"


def share_memory(parameters: Sequence[nn.Parameter], collective: Collective, timeout_seconds: float) -> None:
    """Moves parameters to memory that all ranks share; a rank that leaves the training gets a copy.

    Runs on every rank. The parameters must be equal on all ranks. The memory belongs to no file system, so a
    killed rank leaves no file. If a rank cannot map the memory, every rank raises ValueError.
    """
    starts, end = [], _ALIGNMENT
    for parameter in parameters:
        if not is_dense(parameter):
            # Its elements would overlap the next parameter.
            parameter.data = parameter.data.contiguous()
        starts.append(end)
        end += -(-parameter.nbytes // _ALIGNMENT) * _ALIGNMENT
    memory = _open_memory(end, collective, timeout_seconds)
    able = collective.all_gather(torch.tensor([int(memory is not None)]))
    if memory is None or not all(int(flag) for flag in able):
        raise ValueError(
            f"sync=Hogwild() needs {end:,} bytes of memory that all workers share; run all workers in one "
            f"container with that much memory, or all workers outside of containers, or {_REMEDY}"
        )
    whole = torch.frombuffer(memory, dtype=torch.uint8)
    for parameter, start in zip(parameters, starts, strict=True):
        elements = whole[start : start + parameter.nbytes].view(parameter.dtype)
        shared = view_at(elements, 0, parameter.shape, parameter.stride())
        if collective.rank == 0:
            shared.copy_(parameter.data)
        parameter.data = shared
    collective.barrier()
    collective.on_leave(partial(_leave_memory, parameters))


def _open_memory(num_bytes: int, collective: Collective, timeout_seconds: float) -> mmap.mmap | None:
    """Returns memory that rank 0 creates and shares with the other ranks; None on failure."""
    with ExitStack() as stack:
        memory: mmap.mmap | None = None
        descriptor = -1
        if collective.rank == 0:
            # Only Linux has such memory.
            with suppress(OSError, AttributeError):
                descriptor = os.memfd_create("ringspark-hogwild")
                stack.callback(os.close, descriptor)
                # Allocates the memory now: if memory is short, this fails, but a write would end the process.
                os.posix_fallocate(descriptor, 0, num_bytes)
                memory = mmap.mmap(descriptor, num_bytes)
        link, token = meet_on_host(partial(gather_bytes, collective), collective.rank, stack, timeout_seconds)
        # Rank 0 waits for no connection.
        collective.barrier()
        with suppress(OSError, ValueError):
            if link is not None and collective.rank:
                (descriptor,) = receive_descriptors(link, 1)
                stack.callback(os.close, descriptor)
                memory = mmap.mmap(descriptor, num_bytes)
            elif link is not None and memory is not None:
                send_descriptors(link, token, {rank: [descriptor] for rank in range(1, collective.size)})
        return memory


def _leave_memory(parameters: Sequence[nn.Parameter]) -> None:
    for parameter in parameters:
        parameter.data = parameter.data.clone()


class HogwildSync(GradientSync):
    def __init__(
        self,
        network: nn.Module,
        optimizer: torch.optim.Optimizer,
        collective: Collective,
        settings: SyncSettings,
    ) -> None:
        super().__init__(network, optimizer)
        sync, seconds, size = settings.sync, settings.timeout_seconds, collective.size
        assert isinstance(sync, Hogwild)
        self.in_step = False
        self.loss_factor = float(size)
        self._collective = collective
        table = ParameterTable({}, None, size, sync, seconds)
        no_slices = [dict[int, ParameterSlice]()] * size
        _, self._client = open_service(table, no_slices, [], optimizer, collective, sync, seconds)

    @classmethod
    def prepare(
        cls, module: nn.Module, make_optimizer: MakeOptimizer, mesh: RankMesh, settings: SyncSettings
    ) -> GradientSync:
        collective = mesh.gradients
        if collective.size == 1:
            return GradientAllReduce.prepare(module, make_optimizer, mesh, settings)
        if collective.member.cross_size > 1:
            raise ValueError(
                "sync=Hogwild() trains in the memory of one host, but the workers are on "
                f"{collective.member.cross_size} hosts; {_REMEDY}"
            )
        share_weights(module, mesh)
        trained = [p for p in module.parameters() if p.requires_grad]
        if any(p.device.type != "cpu" for p in trained):
            raise ValueError(f"sync=Hogwild() trains in the host's memory, not on a GPU; {_REMEDY}")
        share_memory(trained, collective, settings.timeout_seconds)
        return cls(module, make_optimizer(module), collective, settings)

    def step(self, scaler: Scaler) -> None:
        groups = self.optimizer.param_groups
        rates = [group["lr"] for group in groups]
        for group, rate in zip(groups, rates, strict=True):
            group["lr"] = rate / self._collective.size
        scaler.step(self.optimizer)
        for group, rate in zip(groups, rates, strict=True):
            group["lr"] = rate
        self._client.progress = self.progress
        self._client.push_step({})
        # Does not wait; raises if a rank is gone.
        self._client.read_all()

    def settle(self) -> None:
        self._client.progress = self.progress
        self._client.pull_all(bound=0)
        # No rank writes the next step before all have called this.
        self._collective.barrier()

    def rank_state(self) -> dict[str, torch.Tensor]:
        self.settle()
        # The checkpoint's own file has rank 0's state.
        return state_tensors(self.network, self.optimizer) if self._collective.rank else {}

    def load_rank_states(self, states: Sequence[Mapping[str, torch.Tensor]], *, is_same: bool) -> None:
        # With another number of ranks, each keeps rank 0's state, which all have loaded.
        if is_same:
            load_tensors(self.network, self.optimizer, states[self._collective.rank])
        # No rank trains before all have written the same weights.
        self._collective.barrier()
