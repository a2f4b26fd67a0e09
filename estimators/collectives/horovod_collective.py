"""Ring-allreduce by Horovod (Sergeev and Del Balso 2018), over Gloo or NCCL.

`hvd.DistributedOptimizer` hooks every parameter's gradient, so the reduction of one layer runs
while the layers before it still compute. Gradients are summed, not averaged: each rank's loss is
already its share of the global mean, which stays right when ranks hold different numbers of rows.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import nn

from ringspark.estimators.collectives.base import (
    GradientSync,
    Member,
    PlainSync,
    ReduceOp,
    Scaler,
    Traffic,
    contiguous,
    num_bytes,
    peer_errors,
)
from ringspark.estimators.collectives.horovod_door import HorovodDoor
from ringspark.estimators.collectives.network import environment, interface_of
from ringspark.estimators.collectives.peer_proof import check_proofs, proofs_for, shared_nonce
from ringspark.estimators.collectives.port_guard import machines_of
from ringspark.estimators.collectives.rendezvous import RendezvousServer
from ringspark.estimators.collectives.rendezvous_client import RendezvousClient


class HorovodCollective:
    """The connected half; `hvd.init` has happened."""

    name = "horovod"

    def __init__(self, member: Member) -> None:
        import horovod.torch as hvd

        self.member = member
        self._hvd = hvd
        # Horovod matches the ranks' tensors by name: the counter gives each operation its own.
        self._operations = 0
        self.traffic = Traffic(member)

    @staticmethod
    def open_rendezvous(
        member: Member, members: list[Member], timeout_seconds: float, secret: bytes
    ) -> RendezvousServer:
        return RendezvousServer(member.host, member.size, secret)

    @classmethod
    def connect(
        cls, member: Member, address: str, timeout_seconds: float, use_gpu: bool, secret: bytes
    ) -> HorovodCollective:
        client = RendezvousClient(member, address, secret, timeout_seconds)
        try:
            import horovod.torch as hvd

            # All have imported what they need: Gloo's ports are open for as short as can be.
            machines = machines_of(client, member, timeout_seconds)
            with HorovodDoor(client, machines) as door:
                settings = _settings(member, door, timeout_seconds)
                # Horovod reads its environment in init only, so nothing of it stays behind.
                with environment(settings), peer_errors("joining the Horovod ring"):
                    hvd.init()
            collective = cls(member)
            try:
                collective._prove(shared_nonce(client, member, timeout_seconds), secret)
            except BaseException:
                collective.abort()
                raise
        finally:
            client.close()
        return collective

    def _prove(self, nonce: bytes, secret: bytes) -> None:
        """Finds out whether a stranger has taken the place of a rank on one of Gloo's connections."""
        mine = torch.frombuffer(bytearray(proofs_for(self.member, nonce, secret)), dtype=torch.uint8)
        with peer_errors("proving the connections"):
            theirs = self._hvd.alltoall(mine, name=self._name("proof"))
        check_proofs(self.member, nonce, secret, bytes(theirs.numpy()))

    @property
    def rank(self) -> int:
        return self.member.rank

    @property
    def size(self) -> int:
        return self.member.size

    @property
    def bytes_sent(self) -> int:
        return self.traffic.bytes_sent

    def _name(self, operation: str) -> str:
        self._operations += 1
        return f"ringspark.{operation}.{self._operations}"

    def all_reduce(self, tensor: torch.Tensor, op: ReduceOp = "sum") -> torch.Tensor:
        ops = {"sum": self._hvd.Sum, "max": self._hvd.Max, "min": self._hvd.Min}
        with peer_errors("allreduce"):
            result: torch.Tensor = self._hvd.allreduce(tensor, op=ops[op], name=self._name("allreduce"))
        self.traffic.all_reduce(num_bytes([result]))
        return result

    def all_gather(self, tensor: torch.Tensor, counts: Sequence[int] | None = None) -> list[torch.Tensor]:
        if counts is None:
            counts = self._gather(torch.tensor([len(tensor)])).tolist()
            self.traffic.all_gather([8] * self.size)
        pieces = self._gather(tensor.detach())
        self.traffic.all_gather([count * tensor.element_size() for count in counts])
        return list(torch.split(pieces, list(counts)))

    def start_reduce_scatter(self, tensor: torch.Tensor, counts: Sequence[int]) -> Callable[[], torch.Tensor]:
        # Horovod cuts into equal parts only: for others all get all, and drop what is not theirs.
        is_even = len(set(counts)) == 1
        start = self._hvd.reducescatter_async if is_even else self._hvd.allreduce_async
        with peer_errors("reduce-scatter"):
            handle = start(tensor, op=self._hvd.Sum, name=self._name("reducescatter"))
        if is_even:
            self.traffic.reduce_scatter([n * tensor.element_size() for n in counts])
        else:
            self.traffic.all_reduce(num_bytes([tensor]))

        def wait() -> torch.Tensor:
            with peer_errors("reduce-scatter"):
                result: torch.Tensor = self._hvd.synchronize(handle)
            return result if is_even else torch.split(result, list(counts))[self.rank].clone()

        return wait

    def _gather(self, tensor: torch.Tensor) -> torch.Tensor:
        """The ranks' tensors behind one another."""
        with peer_errors("allgather"):
            result: torch.Tensor = self._hvd.allgather(tensor, name=self._name("allgather"))
        return result

    def broadcast(self, tensors: list[torch.Tensor], root: int = 0) -> None:
        with contiguous(tensors) as dense, peer_errors("broadcast"):
            handles = [
                self._hvd.broadcast_async_(t, root_rank=root, name=self._name("broadcast")) for t in dense
            ]
            for handle in handles:
                self._hvd.synchronize(handle)
        self.traffic.broadcast(num_bytes(tensors), root)

    def barrier(self) -> None:
        with peer_errors("barrier"):
            self._hvd.barrier()

    def synchronize(
        self, module: nn.Module, optimizer: torch.optim.Optimizer, micro_batches: int
    ) -> GradientSync:
        return HorovodSync(module, optimizer, micro_batches, self._hvd, self.traffic, self.size)

    def close(self) -> None:
        self._hvd.shutdown()

    def abort(self) -> None:
        # Shutting down fails every operation that the peers still wait for.
        self._hvd.shutdown()


def _settings(member: Member, door: HorovodDoor, timeout_seconds: float) -> dict[str, str]:
    """What Horovod takes from its environment."""
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
        "HOROVOD_GLOO_RENDEZVOUS_ADDR": door.address,
        "HOROVOD_GLOO_RENDEZVOUS_PORT": str(door.port),
        "HOROVOD_GLOO_TIMEOUT_SECONDS": str(max(1, int(timeout_seconds))),
    }
    if interface := interface_of(member.host):
        values["HOROVOD_GLOO_IFACE"] = interface
    return values


class HorovodSync(PlainSync):
    """Gradients summed by `hvd.DistributedOptimizer`.

    A parameter without a gradient on this rank, also because the rank has no rows in this step,
    takes part with zeros: Horovod submits it in `synchronize`. Where no rank had a gradient, the sum
    is all zeros, on every rank alike. From the first such step on the ranks tell each other who had
    one, along with the gradients; until then that costs nothing.
    """

    def __init__(
        self,
        module: nn.Module,
        optimizer: torch.optim.Optimizer,
        micro_batches: int,
        hvd: Any,
        traffic: Traffic,
        size: int,
    ) -> None:
        for parameter in module.parameters():
            # Horovod refuses other gradients, and a gradient is laid out as its parameter.
            parameter.data = parameter.data.contiguous()
        distributed = _distribute(module, optimizer, micro_batches, hvd)
        super().__init__(module, distributed)
        self._distributed = distributed
        self._hvd = hvd
        self._traffic = traffic
        self._size = size
        self._asks = False
        held = [p for group in optimizer.param_groups for p in group["params"]]
        self._held = [p for p in held if p.requires_grad]
        self._gradient_bytes = num_bytes(self._held)

    def reduce(self) -> None:
        if self._size == 1:
            # Horovod exchanges nothing, and what was None still is.
            self._distributed.synchronize()
            return
        present = [p.grad is not None for p in self._held]
        with peer_errors("summing the gradients"):
            asked = self._ask(present) if self._asks else None
            self._distributed.synchronize()
            # Every rank sees the same sums, so either all of them begin to ask or none.
            if asked is None and any(_all_zero([p.grad for p in self._held])):
                self._asks = True
                asked = self._ask(present)
            counts = self._hvd.synchronize(asked).tolist() if asked is not None else []
        self._traffic.all_reduce(self._gradient_bytes)
        for parameter, count in zip(self._held, counts, strict=False):
            if not count:
                parameter.grad = None

    def _ask(self, present: list[bool]) -> Any:
        """Begins to count the ranks that had a gradient, parameter by parameter.

        In fp32 and under one name, so that Horovod sends it in one go with the gradients.
        """
        self._traffic.all_reduce(4 * len(present))
        counts = torch.tensor(present, dtype=torch.float32)
        return self._hvd.allreduce_async_(counts, op=self._hvd.Sum, name="ringspark.had_gradient")

    def step(self, scaler: Scaler) -> None:
        with self._distributed.skip_synchronize():
            scaler.step(self._distributed)


def _all_zero(gradients: list[torch.Tensor | None]) -> list[bool]:
    """Which gradients are zero in every element; sparse and empty ones never are."""
    dense = [g for g in gradients if g is not None and not g.is_sparse and g.numel()]
    if not dense:
        return []
    # Most are ruled out by their first element: one small copy off the device instead of a pass over all.
    first = torch.stack([g[(0,) * g.dim()].float() for g in dense]).tolist()
    return [not f and not bool(g.any()) for f, g in zip(first, dense, strict=True)]


def _distribute(module: nn.Module, optimizer: torch.optim.Optimizer, micro_batches: int, hvd: Any) -> Any:
    """Horovod's form of `optimizer`, with all that its maker put into it.

    Horovod makes an optimizer of the same class anew from the groups alone. What its constructor
    keeps elsewhere would fall back to defaults: Adagrad's first accumulator is in its state.
    """
    try:
        distributed = hvd.DistributedOptimizer(
            optimizer,
            named_parameters=[(n, p) for n, p in module.named_parameters() if p.requires_grad],
            op=hvd.Sum,
            backward_passes_per_step=micro_batches,
        )
    except TypeError as error:
        raise ValueError(
            f"optimizer {type(optimizer).__name__} must be constructible from its parameter groups alone "
            f"under collective 'horovod', got {error}; give its other arguments defaults, or set "
            "collective='torch'"
        ) from error
    # A scheduler of the user's may have wrapped `step` of the instance: that one would not be ours.
    kept = {key: value for key, value in vars(optimizer).items() if key != "step"}
    vars(distributed).update(kept)
    return distributed
