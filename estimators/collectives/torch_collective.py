"""Collectives by `torch.distributed`: Gloo between CPUs, NCCL between GPUs."""

from __future__ import annotations

import gc
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from datetime import timedelta
from itertools import accumulate, pairwise
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch.distributed import Store  # type: ignore[attr-defined]

from ringspark.estimators.collectives.base import (
    Collective,
    CollectiveError,
    Levels,
    ReduceOp,
    RendezvousInfo,
    num_bytes,
    peer_errors,
)
from ringspark.estimators.collectives.local_collective import LocalCollective
from ringspark.estimators.collectives.network import interface_of
from ringspark.estimators.collectives.network_collective import NetworkCollective
from ringspark.estimators.collectives.operation_times import AsyncOperation
from ringspark.estimators.collectives.rendezvous.client import RendezvousClient
from ringspark.estimators.collectives.rendezvous.gloo_ports import PortGuard, machines_of
from ringspark.estimators.collectives.rendezvous.peer_proof import (
    PROOF_SECONDS,
    check_proofs,
    proofs_for,
    shared_nonce,
)
from ringspark.estimators.collectives.shared_memory import open_shared_memory
from ringspark.estimators.collectives.traffic import Member, Traffic
from ringspark.estimators.environment import environment

# Largest message that Gloo sends both ways at once.
_TURN_BYTES = 512 << 10


class MemberStore(Store):
    """Replaces `TCPStore`, which serves any client; all-gathers the addresses of a new process group.

    `guard` protects the ports of the new process group. `ranks` is a client of its ranks while they connect.
    """

    def __init__(self, client: RendezvousClient, guard: PortGuard, timeout_seconds: float) -> None:
        super().__init__()
        self._client = client
        self.ranks: RendezvousClient | None = client
        self.guard = guard
        self._seconds = timeout_seconds
        self._own: dict[str, bytes] = {}
        self._found: dict[str, bytes] = {}

    def set(self, key: str, value: str | bytes) -> None:
        # The value may be the address of a new port.
        self.guard.restrict()
        self._own[key] = value.encode() if isinstance(value, str) else bytes(value)
        self._client.set(key, self._own[key])

    def get(self, key: str) -> bytes:
        value = self._client.get(key, self._seconds)
        if value is None:
            raise _no_keys([key], self._seconds)
        return value

    def has_extended_api(self) -> bool:
        return True

    def multi_get(self, keys: list[str]) -> list[bytes]:
        # Gloo has set this rank's address, and gets 128 addresses at a time, from rank 0 on.
        prefix = keys[0].removesuffix("/0")
        if self.ranks and (own := self._own.pop(f"{prefix}/{self.ranks.member.rank}", None)):
            found = self.ranks.all_gather(prefix, own, self._seconds)
            self._found |= {f"{prefix}/{rank}": address for rank, address in enumerate(found)}
        return [self._found.get(key) or self.get(key) for key in keys]

    def add(self, key: str, amount: int) -> int:
        return self._client.add(key, amount)

    def check(self, keys: list[str]) -> bool:
        return all(self._client.get(key) is not None for key in keys)

    def wait(self, keys: list[str], timeout: timedelta | None = None) -> None:
        seconds = self._seconds if timeout is None else timeout.total_seconds()
        deadline = time.monotonic() + seconds
        if any(self._client.get(key, deadline - time.monotonic()) is None for key in keys):
            raise _no_keys(keys, seconds)

    def delete_key(self, key: str) -> bool:
        return self._client.delete(key)

    def set_timeout(self, timeout: timedelta) -> None:
        self._seconds = timeout.total_seconds()

    def clone(self) -> MemberStore:
        """Returns a store on the same connection, because the server accepts one connection per rank."""
        return MemberStore(self._client, self.guard, self._seconds)


def _no_keys(keys: list[str], seconds: float) -> CollectiveError:
    return CollectiveError(
        f"the other ranks did not set {', '.join(keys)} at the rendezvous within {seconds:g} s"
    )


class TorchCollective(NetworkCollective):
    """A collective of a process group, or of the default group if `group` is None."""

    name = "torch"

    def __init__(
        self,
        member: Member,
        rendezvous: RendezvousInfo,
        client: RendezvousClient,
        store: MemberStore | None = None,
    ) -> None:
        super().__init__(member)
        self.group: Any = None
        # World ranks of the group.
        self._ranks: Sequence[int] = range(member.size)
        self._rendezvous, self.client, self._store = rendezvous, client, store
        self._parts = 0

    @classmethod
    def connect(cls, member: Member, rendezvous: RendezvousInfo) -> TorchCollective:
        seconds = rendezvous.timeout_seconds
        client = RendezvousClient(member, rendezvous.address, rendezvous.secret, seconds)
        with ExitStack() as failed:
            failed.callback(client.close)
            # All ranks have finished their imports, so Gloo's ports are open only briefly.
            guard = PortGuard(machines_of(client, member))
            store = MemberStore(client, guard, seconds)
            with peer_errors("joining the process group"):
                _join(member, store, seconds, rendezvous.use_gpu)
            # Every pair is connected, so later connections to Gloo's port are strangers'.
            guard.shut()
            store.ranks = None
            collective = cls(member, rendezvous, client, store)
            failed.callback(collective.abort)
            collective._set_nccl_interface()
            collective._prove(shared_nonce(client, member, seconds), rendezvous.secret, seconds)
            collective.share(open_shared_memory(client, member, seconds))
            if member.has_levels:
                inside = collective.part(member.hosts)
                assert inside is not None
                collective.levels = Levels(inside=inside, between=collective.part([member.leaders]))
            failed.pop_all()
        return collective

    def part(self, groups: Sequence[Sequence[int]]) -> Collective | None:
        """Makes a collective per group of ranks; returns this rank's collective or None. Runs on every rank.

        The groups are ascending and disjoint, and equal on all ranks.
        """
        assert self._store is not None
        seconds = self._rendezvous.timeout_seconds
        self._parts += 1
        name = f"part{self._parts}"
        guard = self._store.guard = PortGuard(self._store.guard.addresses)
        mine = next((list(ranks) for ranks in groups if self.rank in ranks), [])
        member = self.member.within(mine or [self.rank])
        own = self._store.ranks = self.client.within(f"{name}/{mine[:1]}", member)
        made: TorchCollective | None = None
        with environment(_gloo_settings(self.member)), peer_errors("connecting a group of ranks"):
            for ranks in (list(ranks) for ranks in groups if len(ranks) > 1):
                # Every rank makes every group in the same order, so that torch names them alike.
                group = dist.new_group(ranks, timeout=timedelta(seconds=seconds))
                if ranks == mine:
                    made = TorchCollective(member, self._rendezvous, own)
                    made.group, made._ranks = group, ranks
                    made.traffic = Traffic(member, self.traffic)
                    made.operations = self.operations
                del group
        self.client.meet(f"{name}/connected", seconds)
        guard.shut()
        self._store.ranks = None
        if made is None:
            return LocalCollective() if mine else None
        self.on_leave(made._leave)
        made._prove(shared_nonce(own, member, seconds), self._rendezvous.secret, seconds)
        made.share(open_shared_memory(own, member, seconds))
        return made

    def _leave(self) -> None:
        self._release()
        self.group = None

    def _prove(self, nonce: bytes, secret: bytes, timeout_seconds: float) -> None:
        mine = torch.frombuffer(bytearray(proofs_for(self.member, nonce, secret)), dtype=torch.uint8)
        theirs = torch.empty_like(mine)
        with peer_errors("proving the connections"):
            work = dist.all_to_all_single(theirs, mine, async_op=True, group=self.group)
            work.wait(timedelta(seconds=min(timeout_seconds, PROOF_SECONDS)))
        check_proofs(self.member, nonce, secret, bytes(theirs.numpy()))

    def _start_all_reduce(
        self, tensor: torch.Tensor, name: str, op: ReduceOp = "sum"
    ) -> AsyncOperation[None]:
        ops = {"sum": dist.ReduceOp.SUM, "max": dist.ReduceOp.MAX, "min": dist.ReduceOp.MIN}
        with peer_errors("allreduce"):
            work = dist.all_reduce(tensor, ops[op], self.group, async_op=True)
        return AsyncOperation(wait=_waiter(work, "allreduce"), is_done=work.is_completed)

    def _all_gather(self, tensor: torch.Tensor, counts: Sequence[int]) -> list[torch.Tensor]:
        if len(set(counts)) == 1:
            return self._gather_equal(tensor)
        # Gloo only gathers tensors of equal length, so make them equal first. Padding each to the longest
        # one, which may be an embedding, would send it once per rank.
        even = [-(-sum(counts) // self.size)] * self.size
        sent, arriving = _overlaps(self.rank, counts, even), _overlaps(self.rank, even, counts)
        self.traffic.all_to_all([n * tensor.element_size() for n in sent])
        part = self._all_to_all(tensor, sent, arriving)
        whole = torch.cat(self._gather_equal(F.pad(part, (0, even[0] - len(part)))))
        return list(torch.split(whole[: sum(counts)], list(counts)))

    def _gather_equal(self, tensor: torch.Tensor) -> list[torch.Tensor]:
        pieces = [torch.empty_like(tensor) for _ in range(self.size)]
        turns = zip(*(torch.split(t, _turn_length(tensor)) for t in (tensor, *pieces)), strict=True)
        with peer_errors("allgather"):
            works = [
                dist.all_gather(parts, part, async_op=True, group=self.group)
                for part, *parts in turns
                if len(part)
            ]
            for work in works:
                work.wait()
        self.traffic.all_gather([num_bytes([tensor])] * self.size)
        return pieces

    def _start_reduce_scatter(self, tensor: torch.Tensor) -> AsyncOperation[torch.Tensor]:
        mine = tensor.new_empty(len(tensor) // self.size)
        with peer_errors("reduce-scatter"):
            work = _reduce_scatter_even(mine, tensor, self.group)

        def wait() -> torch.Tensor:
            with peer_errors("reduce-scatter"):
                work.wait()
            return mine

        return AsyncOperation(wait=wait, is_done=work.is_completed)

    def _all_to_all(self, joined: torch.Tensor, sent: Sequence[int], arriving: Sequence[int]) -> torch.Tensor:
        received = joined.new_empty(sum(arriving))
        with peer_errors("all-to-all"):
            if joined.device.type == "cuda":
                dist.all_to_all_single(received, joined, list(arriving), list(sent), group=self.group)
                return received
            to, of = torch.split(joined, list(sent)), torch.split(received, list(arriving))
            of[self.rank].copy_(to[self.rank])
            # One message per pair, because Gloo's all-to-all sends long tensors one way first.
            peers = [peer for peer in range(self.size) if peer != self.rank]
            known = {"group": self.group}
            works: list[Any] = [dist.irecv(of[p], src=self._ranks[p], **known) for p in peers if len(of[p])]
            works += [dist.isend(to[p], dst=self._ranks[p], **known) for p in peers if len(to[p])]
            for work in works:
                work.wait()
        return received

    def start_send(self, tensor: torch.Tensor, to: int) -> Callable[[], None]:
        """Starts to send a contiguous tensor; returns a function that waits until the tensor may change."""
        self.traffic.send(num_bytes([tensor]))
        with peer_errors("send"):
            return _waiter(dist.isend(tensor, dst=self._ranks[to], group=self.group), "send")

    def start_receive(self, tensor: torch.Tensor, source: int) -> Callable[[], None]:
        with peer_errors("receive"):
            return _waiter(dist.irecv(tensor, src=self._ranks[source], group=self.group), "receive")

    def _broadcast(self, tensors: list[torch.Tensor], root: int) -> None:
        with peer_errors("broadcast"):
            for tensor in tensors:
                dist.broadcast(tensor, src=self._ranks[root], group=self.group)

    def abort(self) -> None:
        stop = getattr(dist.distributed_c10d, "_abort_process_group", None)
        if self._rendezvous.use_gpu and stop is not None:
            # NCCL's destroy waits for operations that will never end; its abort does not.
            stop()
        self.close()

    def close(self) -> None:
        # Connections close only with the last reference to the group.
        self._release()
        gc.collect()
        if dist.is_initialized():
            dist.destroy_process_group()
        self.client.close()


def _join(member: Member, store: MemberStore, timeout_seconds: float, use_gpu: bool) -> None:
    # torch's compiler, which optimizers import, imports this module. The default arguments of its functions
    # hold the group that exists then, and Gloo's port, for the life of the process.
    import torch.distributed.nn  # noqa: F401

    with environment(_gloo_settings(member)):
        # Both backends, because metrics are CPU tensors even if gradients are on GPUs.
        dist.init_process_group(
            "cpu:gloo,cuda:nccl" if use_gpu else "gloo",
            store=store,
            rank=member.rank,
            world_size=member.size,
            timeout=timedelta(seconds=timeout_seconds),
        )


@peer_errors("gather")
def gather_on_root(tensor: torch.Tensor, counts: Sequence[int], group: Any, root: int) -> list[torch.Tensor]:
    """Gathers 1-D tensors on rank `root`; other ranks get none. Gloo's own gather needs equal lengths."""
    ranks = dist.get_process_group_ranks(group)
    if dist.get_rank() != ranks[root]:
        if len(tensor):
            dist.send(tensor, dst=ranks[root], group=group)
        return []
    pieces = [tensor if i == root else tensor.new_empty(count) for i, count in enumerate(counts)]
    arriving = [(r, piece) for i, (r, piece) in enumerate(zip(ranks, pieces, strict=True)) if i != root]
    works: list[Any] = [dist.irecv(piece, src=r, group=group) for r, piece in arriving if len(piece)]
    for work in works:
        work.wait()
    return pieces


def _overlaps(rank: int, own: Sequence[int], others: Sequence[int]) -> list[int]:
    """Returns how many elements of the rank's shard, by `own`, are in each shard by `others`."""
    begin, bounds = sum(own[:rank]), list(accumulate(others, initial=0))
    end = begin + own[rank]
    return [max(0, min(end, high) - max(begin, low)) for low, high in pairwise(bounds)]


def _waiter(work: Any, operation: str) -> Callable[[], None]:
    def wait() -> None:
        with peer_errors(operation):
            work.wait()

    return wait


def _gloo_settings(member: Member) -> dict[str, str | None]:
    # With lazy connections, Gloo's port would stay open during the training.
    values: dict[str, str | None] = {"TORCH_GLOO_LAZY_INIT": "0"}
    # One request for all addresses. Without a number for each pair of ranks, an address has a fixed length.
    values |= {"GLOO_ENABLE_STORE_V2_API": "1", "GLOO_ENABLE_RANK_AS_SEQUENCE_NUMBER": "1"}
    if interface := interface_of(member.host):
        values["GLOO_SOCKET_IFNAME"] = interface
    return values


def _turn_length(tensor: torch.Tensor) -> int:
    """Returns how many elements to gather at a time.

    Gloo sends a long tensor in one direction before the other direction starts, which leaves one half of a
    full-duplex link idle.
    """
    return max(1, len(tensor) if tensor.device.type == "cuda" else _TURN_BYTES // tensor.element_size())


def _reduce_scatter_even(part: torch.Tensor, whole: torch.Tensor, group: Any) -> Any:
    # torch 2.13 renamed the call.
    name = "reduce_scatter_single" if hasattr(dist, "reduce_scatter_single") else "reduce_scatter_tensor"
    return getattr(dist, name)(part, whole, async_op=True, group=group)
