"""Ring-allreduce by Horovod (Sergeev and Del Balso 2018), over Gloo or NCCL.

`hvd.DistributedOptimizer` hooks every parameter's gradient, so the reduction of one layer runs
while the layers before it still compute. Gradients are summed, not averaged: each rank's loss is
already its share of the global mean, which stays right when ranks hold different numbers of rows.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from ringspark.estimators.collectives.base import (
    GradientSync,
    Member,
    PlainSync,
    ReduceOp,
    peer_errors,
)
from ringspark.estimators.collectives.network import environment, interface_of


class HorovodRendezvous:
    """Horovod's HTTP key-value server, in this process."""

    def __init__(self, member: Member, members: list[Member]) -> None:
        from horovod.runner.common.util.hosts import SlotInfo
        from horovod.runner.http.http_server import RendezvousServer

        self._server = RendezvousServer(verbose=0)
        port = self._server.start()
        self._server.init(
            [
                SlotInfo(
                    hostname=m.host,
                    rank=m.rank,
                    local_rank=m.local_rank,
                    cross_rank=m.cross_rank,
                    size=m.size,
                    local_size=m.local_size,
                    cross_size=m.cross_size,
                )
                for m in members
            ]
        )
        self.address = f"{member.host}:{port}"

    def close(self) -> None:
        self._server.stop()
        # Horovod's own stop leaves the listening socket, and so the port, open.
        self._server._httpd.server_close()


class HorovodCollective:
    """The connected half; `hvd.init` has happened."""

    name = "horovod"

    def __init__(self, member: Member) -> None:
        import horovod.torch as hvd

        self.member = member
        self._hvd = hvd
        # Horovod matches the ranks' tensors by name: the counter gives each operation its own.
        self._operations = 0

    @staticmethod
    def open_rendezvous(member: Member, members: list[Member], timeout_seconds: float) -> HorovodRendezvous:
        return HorovodRendezvous(member, members)

    @classmethod
    def connect(
        cls, member: Member, address: str, timeout_seconds: float, use_gpu: bool
    ) -> HorovodCollective:
        import horovod.torch as hvd

        host, port = address.rsplit(":", 1)
        values = {
            "HOROVOD_RANK": str(member.rank),
            "HOROVOD_SIZE": str(member.size),
            "HOROVOD_LOCAL_RANK": str(member.local_rank),
            "HOROVOD_LOCAL_SIZE": str(member.local_size),
            "HOROVOD_CROSS_RANK": str(member.cross_rank),
            "HOROVOD_CROSS_SIZE": str(member.cross_size),
            "HOROVOD_HOSTNAME": member.host,
            "HOROVOD_CONTROLLER": "gloo",
            "HOROVOD_CPU_OPERATIONS": "gloo",
            "HOROVOD_GLOO_RENDEZVOUS_ADDR": host,
            "HOROVOD_GLOO_RENDEZVOUS_PORT": port,
            "HOROVOD_GLOO_TIMEOUT_SECONDS": str(max(1, int(timeout_seconds))),
        }
        if interface := interface_of(member.host):
            values["HOROVOD_GLOO_IFACE"] = interface
        # Horovod reads its environment in init only, so nothing of it stays behind.
        with environment(values), peer_errors("joining the Horovod ring"):
            hvd.init()
        return cls(member)

    @property
    def rank(self) -> int:
        return self.member.rank

    @property
    def size(self) -> int:
        return self.member.size

    def _name(self, operation: str) -> str:
        self._operations += 1
        return f"ringspark.{operation}.{self._operations}"

    def all_reduce(self, tensor: torch.Tensor, op: ReduceOp = "sum") -> torch.Tensor:
        ops = {"sum": self._hvd.Sum, "max": self._hvd.Max, "min": self._hvd.Min}
        with peer_errors("allreduce"):
            result: torch.Tensor = self._hvd.allreduce(tensor, op=ops[op], name=self._name("allreduce"))
        return result

    def broadcast(self, tensors: list[torch.Tensor], root: int = 0) -> None:
        with peer_errors("broadcast"):
            handles = [
                self._hvd.broadcast_async_(t, root_rank=root, name=self._name("broadcast")) for t in tensors
            ]
            for handle in handles:
                self._hvd.synchronize(handle)

    def barrier(self) -> None:
        with peer_errors("barrier"):
            self._hvd.barrier()

    def synchronize(
        self, module: nn.Module, optimizer: torch.optim.Optimizer, micro_batches: int
    ) -> GradientSync:
        return HorovodSync(module, optimizer, micro_batches, self._hvd)

    def close(self) -> None:
        self._hvd.shutdown()

    def abort(self) -> None:
        # Shutting down fails every operation that the peers still wait for.
        self._hvd.shutdown()


class HorovodSync(PlainSync):
    """Gradients summed by `hvd.DistributedOptimizer`.

    A parameter without a gradient on this rank, also because the rank has no rows in this step,
    takes part with zeros: Horovod submits it in `synchronize`.
    """

    def __init__(
        self, module: nn.Module, optimizer: torch.optim.Optimizer, micro_batches: int, hvd: Any
    ) -> None:
        distributed = hvd.DistributedOptimizer(
            optimizer,
            named_parameters=[(n, p) for n, p in module.named_parameters() if p.requires_grad],
            op=hvd.Sum,
            backward_passes_per_step=micro_batches,
        )
        super().__init__(module, distributed)
        self._distributed = distributed

    def reduce(self) -> None:
        with peer_errors("summing the gradients"):
            self._distributed.synchronize()

    def step(self, scaler: torch.amp.GradScaler) -> None:
        with self._distributed.skip_synchronize():
            scaler.step(self._distributed)
