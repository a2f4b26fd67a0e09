"""Ring-allreduce by Horovod (Sergeev and Del Balso 2018), over Gloo or NCCL."""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Sequence
from contextlib import ExitStack, closing
from functools import partial
from typing import Any

import torch

from ringspark.estimators.collectives.base import (
    Collective,
    Levels,
    ReduceOp,
    RendezvousInfo,
    peer_errors,
)
from ringspark.estimators.collectives.local_collective import LocalCollective
from ringspark.estimators.collectives.network import interface_of, name_problem
from ringspark.estimators.collectives.network_collective import NetworkCollective
from ringspark.estimators.collectives.operation_times import AsyncOperation
from ringspark.estimators.collectives.rendezvous.client import RendezvousClient
from ringspark.estimators.collectives.rendezvous.gloo_ports import machines_of
from ringspark.estimators.collectives.rendezvous.horovod_proxy import HorovodProxy
from ringspark.estimators.collectives.rendezvous.peer_proof import check_proofs, proofs_for, shared_nonce
from ringspark.estimators.collectives.shared_memory import open_shared_memory
from ringspark.estimators.collectives.traffic import Member, Traffic
from ringspark.estimators.environment import environment

# Seconds between two polls of an all-reduce.
_POLL_SECONDS = 20e-6

# Suffixes of Horovod's version, from extras/commands/build_horovod.py: the build binds to a given interface,
# and the cycle time can be set at each start.
_MENDED, _CYCLE_MENDED = "+iface", "+iface.cycle"

# Horovod's thread looks for work once per cycle. Each cycle costs a message between the ranks, and an
# operation waits for the next cycle. Ranks that share memory need Horovod only to prove their identity and
# to leave.
_CYCLE_MS, _RARE_CYCLE_MS = 1, 30

_CYCLE_TIME = "HOROVOD_CYCLE_TIME"
_FUSION = "HOROVOD_FUSION_THRESHOLD"

# Largest message that Gloo sends both ways at once; longer ones are sent one way first.
_TURN_BYTES = 512 << 10
# Rank 0 stores 4 bytes per pair of ranks while they connect; without room Horovod would end the process.
_MOST_RANKS = 4_000

_logger = logging.getLogger(__name__)


class HorovodCollective(NetworkCollective):
    name = "horovod"

    def __init__(self, member: Member, ranks: Any = None) -> None:
        import horovod.torch as hvd

        super().__init__(member)
        self._hvd = hvd
        self._set = hvd.global_process_set if ranks is None else ranks

    @classmethod
    def connect(cls, member: Member, rendezvous: RendezvousInfo) -> HorovodCollective:
        if member.size > _MOST_RANKS:
            raise ValueError(
                f"collective='horovod' connects at most {_MOST_RANKS:,} workers, got {member.size:,}; lower "
                "numWorkers or set collective='torch'"
            )
        seconds = rendezvous.timeout_seconds
        client = RendezvousClient(member, rendezvous.address, rendezvous.secret, seconds)
        with closing(client), ExitStack() as failed:
            import horovod.torch as hvd

            if rendezvous.use_gpu:
                check_nccl()
            _check_name(member)
            # All ranks have finished their imports, so Gloo's ports are open only briefly.
            machines = machines_of(client, member)
            memory = open_shared_memory(client, member, seconds)
            if memory is not None:
                failed.callback(memory.close)
            sets = [hvd.ProcessSet(ranks) for ranks in _groups(member)]
            with HorovodProxy(client, machines, seconds) as proxy:
                settings = {
                    **rank_variables(member, proxy, seconds),
                    # Gradients come in buckets, so fusion would only copy them.
                    _FUSION: os.environ.get(_FUSION, "0"),
                    **_cycle(is_rare=memory is not None and not rendezvous.use_gpu),
                }
                # Horovod reads its environment only in init, so the settings need not stay.
                with environment(settings), peer_errors("joining the Horovod ring"):
                    hvd.init(process_sets=sets)
            collective = cls(member)
            failed.callback(collective.abort)
            collective.share(memory)
            collective._set_nccl_interface()
            nonce = shared_nonce(client, member, seconds)
            collective._prove(nonce, rendezvous.secret)
            if sets:
                collective.levels = collective._levels(sets, client, nonce, rendezvous)
            failed.pop_all()
        return collective

    def _levels(
        self, sets: Sequence[Any], client: RendezvousClient, nonce: bytes, rendezvous: RendezvousInfo
    ) -> Levels:
        inside: Collective = LocalCollective()
        between: Collective | None = None
        for number, (ranks, known) in enumerate(zip(_groups(self.member), sets, strict=True)):
            if self.rank not in ranks:
                continue
            part = HorovodCollective(self.member.within(ranks), known)
            part.traffic = Traffic(part.member, self.traffic)
            part.operations = self.operations
            self.on_leave(part._release)
            name = f"part{number}"
            # Each set has its own connections, and needs its own proof.
            part._prove(nonce + name.encode(), rendezvous.secret)
            part.share(
                open_shared_memory(client.within(name, part.member), part.member, rendezvous.timeout_seconds)
            )
            if number == 0:
                between = part
            else:
                inside = part
        return Levels(inside=inside, between=between)

    def _prove(self, nonce: bytes, secret: bytes) -> None:
        mine = torch.frombuffer(bytearray(proofs_for(self.member, nonce, secret)), dtype=torch.uint8)
        with peer_errors("proving the connections"):
            theirs = self._hvd.alltoall(mine, name=self._name("proof"), process_set=self._set)
        check_proofs(self.member, nonce, secret, bytes(theirs.numpy()))

    def _start_all_reduce(
        self, tensor: torch.Tensor, name: str, op: ReduceOp = "sum"
    ) -> AsyncOperation[None]:
        ops = {"sum": self._hvd.Sum, "max": self._hvd.Max, "min": self._hvd.Min}
        with peer_errors("allreduce"):
            handle = self._hvd.allreduce_async_(tensor, op=ops[op], name=name, process_set=self._set)

        def wait() -> None:
            with peer_errors("allreduce"):
                # Horovod itself polls only every millisecond, as long as the whole step of a small network.
                while not self._hvd.poll(handle):
                    time.sleep(_POLL_SECONDS)
                self._hvd.synchronize(handle)

        return AsyncOperation(wait=wait, is_done=partial(self._hvd.poll, handle))

    def _all_gather(self, tensor: torch.Tensor, counts: Sequence[int]) -> list[torch.Tensor]:
        self.traffic.all_gather([count * tensor.element_size() for count in counts])
        width = max(1, _TURN_BYTES // tensor.element_size())
        if max(counts) <= width or tensor.device.type == "cuda":
            with peer_errors("allgather"):
                joined = self._hvd.allgather(tensor, name=self._name("allgather"), process_set=self._set)
            return list(torch.split(joined, list(counts)))
        pieces = [tensor.new_empty(count) for count in counts]
        turns = range(0, max(counts), width)
        with peer_errors("allgather"):
            handles = [
                self._hvd.allgather_async(
                    tensor[begin : begin + width], name=self._name("allgather"), process_set=self._set
                )
                for begin in turns
            ]
            for begin, handle in zip(turns, handles, strict=True):
                parts = [piece[begin : begin + width] for piece in pieces]
                arrived = torch.split(self._hvd.synchronize(handle), [len(part) for part in parts])
                for part, values in zip(parts, arrived, strict=True):
                    part.copy_(values)
        return pieces

    def _start_reduce_scatter(self, tensor: torch.Tensor) -> AsyncOperation[torch.Tensor]:
        with peer_errors("reduce-scatter"):
            handle = self._hvd.reducescatter_async(
                tensor, op=self._hvd.Sum, name=self._name("reducescatter"), process_set=self._set
            )

        def wait() -> torch.Tensor:
            with peer_errors("reduce-scatter"):
                result: torch.Tensor = self._hvd.synchronize(handle)
            return result

        return AsyncOperation(wait=wait, is_done=partial(self._hvd.poll, handle))

    def _all_to_all(self, joined: torch.Tensor, sent: Sequence[int], arriving: Sequence[int]) -> torch.Tensor:
        received = joined.new_empty(sum(arriving))
        to, of = torch.split(joined, list(sent)), torch.split(received, list(arriving))
        # Equally many turns on every rank, because no rank knows the sizes of other ranks.
        turns = range(0, max(1, int(self._all_reduce(torch.tensor([max(sent)]), "max"))), _TURN_BYTES)
        handles = []
        with peer_errors("all-to-all"):
            for begin in turns:
                parts = [piece[begin : begin + _TURN_BYTES] for piece in to]
                splits = torch.tensor([len(part) for part in parts], dtype=torch.int32)
                name = self._name("alltoall")
                handles.append(
                    self._hvd.alltoall_async(torch.cat(parts), splits, name=name, process_set=self._set)
                )
            for begin, handle in zip(turns, handles, strict=True):
                arrived, lengths = self._hvd.synchronize(handle)
                for piece, part in zip(of, torch.split(arrived, lengths.tolist()), strict=True):
                    piece[begin : begin + len(part)] = part
        return received

    def _broadcast(self, tensors: list[torch.Tensor], root: int) -> None:
        ranks: Sequence[int] | None = self._set.ranks
        first = root if ranks is None else ranks[root]
        with peer_errors("broadcast"):
            handles = [
                self._hvd.broadcast_async_(t, first, name=self._name("broadcast"), process_set=self._set)
                for t in tensors
            ]
            for handle in handles:
                self._hvd.synchronize(handle)

    def close(self) -> None:
        self._release()
        # Pending operations of peers fail, so aborting is the same.
        self._hvd.shutdown()

    abort = close


def _groups(member: Member) -> list[list[int]]:
    if not member.has_levels:
        return []
    return [list(member.leaders), *(ranks for ranks in member.hosts if len(ranks) > 1)]


def check_nccl() -> None:
    """Raises ValueError if this Horovod would sum the gradients of GPUs in host memory."""
    import horovod.torch as hvd

    if not hvd.nccl_built():
        raise ValueError(
            "useGpu=True with collective='horovod' needs a Horovod that is built with NCCL, but the "
            "installed one would send gradients through host memory; set collective='torch', or build "
            "Horovod with CUDA and HOROVOD_GPU_OPERATIONS=NCCL"
        )


def _check_name(member: Member) -> None:
    from horovod import __version__ as version

    if member.local_size == member.size or _MENDED in version:
        return
    if problem := name_problem(member.host):
        raise ValueError(
            f"Horovod {version} listens at the address to which the host's name resolves, but {problem}; "
            "add the name and the address to /etc/hosts of that host, build Horovod as ringspark's set-up "
            "does, or set collective='torch'"
        )


def _cycle(*, is_rare: bool) -> dict[str, str | None]:
    """Returns the environment variable of Horovod's cycle time.

    `is_rare`: whether shared memory carries the data; a longer cycle then saves messages.
    """
    from horovod import __version__ as version

    chosen = os.environ.get(_CYCLE_TIME)
    if _CYCLE_MENDED not in version:
        # Other builds end the process at their second start with a cycle time and a fusion threshold.
        if chosen is not None:
            _logger.warning(
                "%s=%s is not used: Horovod %s cannot set it twice in a process, and Spark reuses worker "
                "processes; build Horovod as ringspark's set-up does",
                _CYCLE_TIME,
                chosen,
                version,
            )
        return {_CYCLE_TIME: None}
    if chosen is None and os.environ.get("HOROVOD_AUTOTUNE", "0") != "0":
        return {_CYCLE_TIME: None}  # Horovod tunes it
    return {_CYCLE_TIME: chosen or str(_RARE_CYCLE_MS if is_rare else _CYCLE_MS)}


def rank_variables(member: Member, proxy: HorovodProxy, timeout_seconds: float) -> dict[str, str]:
    """Returns the environment variables with which `hvd.init` joins this rank to the others."""
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
        "HOROVOD_GLOO_RENDEZVOUS_ADDR": proxy.address,
        "HOROVOD_GLOO_RENDEZVOUS_PORT": str(proxy.port),
        "HOROVOD_GLOO_TIMEOUT_SECONDS": str(max(1, int(timeout_seconds))),
    }
    if interface := interface_of(member.host):
        values["HOROVOD_GLOO_IFACE"] = interface
    return values
