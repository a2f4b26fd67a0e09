"""`torch.distributed`: Gloo between CPUs, NCCL between GPUs, gradients by DistributedDataParallel."""

from __future__ import annotations

import gc
from contextlib import AbstractContextManager, nullcontext
from datetime import timedelta
from inspect import signature
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed import TCPStore  # type: ignore[attr-defined]
from torch.nn.parallel import DistributedDataParallel

from ringspark.estimators.collectives.base import (
    GradientSync,
    Member,
    PlainSync,
    ReduceOp,
    peer_errors,
)
from ringspark.estimators.collectives.network import environment, interface_of


class TorchRendezvous:
    """A `TCPStore` server on a free port."""

    def __init__(self, member: Member, timeout_seconds: float) -> None:
        self._store: TCPStore | None = TCPStore(
            member.host,
            0,
            is_master=True,
            wait_for_workers=False,
            timeout=timedelta(seconds=timeout_seconds),
        )
        self.address = f"{member.host}:{self._store.port}"

    def close(self) -> None:
        self._store = None


class TorchCollective:
    """The connected half; the default process group is ours."""

    name = "torch"

    def __init__(self, member: Member, use_gpu: bool) -> None:
        self.member = member
        self._use_gpu = use_gpu
        self._syncs: list[TorchSync] = []

    @staticmethod
    def open_rendezvous(member: Member, members: list[Member], timeout_seconds: float) -> TorchRendezvous:
        return TorchRendezvous(member, timeout_seconds)

    @classmethod
    def connect(cls, member: Member, address: str, timeout_seconds: float, use_gpu: bool) -> TorchCollective:
        host, port = address.rsplit(":", 1)
        timeout = timedelta(seconds=timeout_seconds)
        values = {}
        if interface := interface_of(member.host):
            values = {"GLOO_SOCKET_IFNAME": interface, "NCCL_SOCKET_IFNAME": interface}
        with environment(values), peer_errors("joining the process group"):
            store = TCPStore(host, int(port), is_master=False, timeout=timeout)
            # Both backends: metrics travel as CPU tensors also where gradients are on GPUs.
            dist.init_process_group(
                "cpu:gloo,cuda:nccl" if use_gpu else "gloo",
                store=store,
                rank=member.rank,
                world_size=member.size,
                timeout=timeout,
            )
        return cls(member, use_gpu)

    @property
    def rank(self) -> int:
        return self.member.rank

    @property
    def size(self) -> int:
        return self.member.size

    def all_reduce(self, tensor: torch.Tensor, op: ReduceOp = "sum") -> torch.Tensor:
        ops = {"sum": dist.ReduceOp.SUM, "max": dist.ReduceOp.MAX, "min": dist.ReduceOp.MIN}
        result = tensor.clone()
        with peer_errors("allreduce"):
            dist.all_reduce(result, op=ops[op])
        return result

    def broadcast(self, tensors: list[torch.Tensor], root: int = 0) -> None:
        with peer_errors("broadcast"):
            for tensor in tensors:
                dist.broadcast(tensor, src=root)

    def barrier(self) -> None:
        self.all_reduce(torch.zeros(1))

    def synchronize(
        self, module: nn.Module, optimizer: torch.optim.Optimizer, micro_batches: int
    ) -> GradientSync:
        sync = TorchSync(module, optimizer, self.size)
        self._syncs.append(sync)
        return sync

    def close(self) -> None:
        self._leave()

    def abort(self) -> None:
        stop = getattr(dist.distributed_c10d, "_abort_process_group", None)
        if self._use_gpu and stop is not None:
            # NCCL's destroy waits for operations that will never end; abort does not.
            stop()
        self._leave()

    def _leave(self) -> None:
        # The peers see the connection close only when the last reference to the group is gone,
        # and the reducer of DistributedDataParallel holds one.
        for sync in self._syncs:
            sync.release()
        self._syncs.clear()
        gc.collect()
        if dist.is_initialized():
            dist.destroy_process_group()


class TorchSync(PlainSync):
    """Gradients averaged by DistributedDataParallel; `loss_factor` turns the mean into a sum."""

    # Its reducer waits for every bucket of every rank.
    needs_backward = True

    def __init__(self, module: nn.Module, optimizer: torch.optim.Optimizer, size: int) -> None:
        device = next(module.parameters()).device
        # Without syncing buffers: as with Horovod, running statistics stay each rank's own and
        # the checkpoint takes rank 0's. torch 2.13 renamed the argument.
        renamed = "forward_sync_buffers" in signature(DistributedDataParallel).parameters
        options: dict[str, Any] = {"forward_sync_buffers" if renamed else "broadcast_buffers": False}
        parallel = DistributedDataParallel(
            module, device_ids=[device] if device.type == "cuda" else None, **options
        )
        super().__init__(parallel, optimizer)
        self.loss_factor = float(size)

    def micro_batch(self, last: bool) -> AbstractContextManager[object]:
        if isinstance(self.module, DistributedDataParallel) and not last:
            return self.module.no_sync()
        return nullcontext()

    def reduce(self) -> None:
        return

    def release(self) -> None:
        """Gives the wrapped module back and drops the reducer."""
        if isinstance(self.module, DistributedDataParallel):
            self.module = self.module.module
