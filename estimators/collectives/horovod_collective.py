"""Ring-allreduce by Horovod (Sergeev and Del Balso 2018), over Gloo or NCCL."""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Sequence
from functools import partial
from typing import Any

import torch

from ringspark.estimators.collectives.base import (
    Collective,
    Levels,
    Meeting,
    ReduceOp,
    num_bytes,
    peer_errors,
)
from ringspark.estimators.collectives.local_collective import LocalCollective
from ringspark.estimators.collectives.network import interface_of, name_problem
from ringspark.estimators.collectives.operation_times import Started
from ringspark.estimators.collectives.rendezvous.client import RendezvousClient
from ringspark.estimators.collectives.rendezvous.gloo_ports import machines_of
from ringspark.estimators.collectives.rendezvous.horovod_door import HorovodDoor
from ringspark.estimators.collectives.rendezvous.peer_proof import check_proofs, proofs_for, shared_nonce
from ringspark.estimators.collectives.shared_memory import open_shared_memory
from ringspark.estimators.collectives.sharing_member import SharingMember
from ringspark.estimators.collectives.traffic import Member, Traffic
from ringspark.estimators.environment import environment

# Seconds between two looks whether a sum is complete.
_LOOK_SECONDS = 20e-6

# Labels of a build that binds to the interface it is told, and of one that can set its cycle time at each
# start, see scripts/setup_environment.py.
_MENDED, _CYCLE_MENDED = "+iface", "+iface.cycle"

# Between two looks for work Horovod's thread sleeps so long. At each look the ranks exchange a message, which
# takes time from the training; and an operation waits for the next look. Ranks that share memory need
# Horovod only to prove who they are and to leave.
_CYCLE_MS, _RARE_CYCLE_MS = 1, 30

_CYCLE_TIME = "HOROVOD_CYCLE_TIME"

# Of a message that Gloo sends both ways at once: a longer one travels one way before the other begins.
_TURN_BYTES = 512 << 10
# Horovod counts the elements of an all-to-all in 32 bits, so `_gather` sends bytes above this number.
_MOST_ELEMENTS = 2**31 - 1

_logger = logging.getLogger(__name__)


class HorovodCollective(SharingMember):
    """The connected half of the collective; exists after `hvd.init`."""

    name = "horovod"

    def __init__(self, member: Member, ranks: Any = None) -> None:
        """Stands for all ranks, or for some.

        Args:
            ranks: Horovod's set of these ranks; None for all.
        """
        import horovod.torch as hvd

        super().__init__(member)
        self._hvd = hvd
        self._set = hvd.global_process_set if ranks is None else ranks
        # Horovod matches the ranks' tensors by name; the counter gives each operation a new one.
        self._operations = 0

    @classmethod
    def connect(cls, member: Member, meeting: Meeting) -> HorovodCollective:
        seconds = meeting.timeout_seconds
        client = RendezvousClient(member, meeting.address, meeting.secret, seconds)
        try:
            import horovod.torch as hvd

            if meeting.use_gpu:
                check_nccl()
            _check_name(member)
            # All ranks have done their imports before, so Gloo's ports are open as briefly as possible.
            machines = machines_of(client, member, seconds)
            memory = open_shared_memory(client, member, seconds)
            sets = [hvd.ProcessSet(ranks) for ranks in _groups(member)]
            try:
                with HorovodDoor(client, machines) as door:
                    settings = _settings(member, door, seconds)
                    settings |= _cycle(is_rare=memory is not None and not meeting.use_gpu)
                    # Horovod reads its environment only in init, so the settings need not stay.
                    with environment(settings), peer_errors("joining the Horovod ring"):
                        hvd.init(process_sets=sets)
            except BaseException:
                if memory is not None:
                    memory.close()
                raise
            collective = cls(member)
            collective.share(memory)
            try:
                collective._tell_nccl()
                nonce = shared_nonce(client, member, seconds)
                collective._prove(nonce, meeting.secret)
                if sets:
                    collective.levels = collective._levels(sets, client, nonce, meeting)
            except BaseException:
                collective.abort()
                raise
        finally:
            client.close()
        return collective

    def _levels(
        self, sets: Sequence[Any], client: RendezvousClient, nonce: bytes, meeting: Meeting
    ) -> Levels:
        """Returns this rank's host and the hosts among each other. Runs on every rank.

        Args:
            sets: Horovod's sets of `_groups`.
        """
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
            # Other sets have other connections, which a proof of this one must not fit.
            part._prove(nonce + name.encode(), meeting.secret)
            part.share(
                open_shared_memory(client.within(name, part.member), part.member, meeting.timeout_seconds)
            )
            if number == 0:
                between = part
            else:
                inside = part
        return Levels(inside=inside, between=between)

    def _prove(self, nonce: bytes, secret: bytes) -> None:
        """Raises an error if a stranger has taken the place of a rank on one of Gloo's connections."""
        mine = torch.frombuffer(bytearray(proofs_for(self.member, nonce, secret)), dtype=torch.uint8)
        with peer_errors("proving the connections"):
            theirs = self._hvd.alltoall(mine, name=self._name("proof"), process_set=self._set)
        check_proofs(self.member, nonce, secret, bytes(theirs.numpy()))

    def _name(self, operation: str) -> str:
        self._operations += 1
        return f"ringspark.{operation}.{self._operations}"  # a set of ranks has names of its own

    def _all_reduce(self, tensor: torch.Tensor, op: ReduceOp) -> torch.Tensor:
        ops = {"sum": self._hvd.Sum, "max": self._hvd.Max, "min": self._hvd.Min}
        with peer_errors("allreduce"):
            result: torch.Tensor = self._hvd.allreduce(
                tensor, op=ops[op], name=self._name("allreduce"), process_set=self._set
            )
        return result

    def _start_sum(self, tensor: torch.Tensor, name: str) -> Started[None]:
        with peer_errors("allreduce"):
            # The same name in every step, because Horovod keeps what the ranks agreed on by name.
            handle = self._hvd.allreduce_async_(
                tensor, op=self._hvd.Sum, name=f"ringspark.{name}", process_set=self._set
            )

        def wait() -> None:
            with peer_errors("allreduce"):
                # Horovod itself looks only every millisecond, which a small network takes for its whole step.
                while not self._hvd.poll(handle):
                    time.sleep(_LOOK_SECONDS)
                self._hvd.synchronize(handle)

        return Started(wait=wait, is_done=partial(self._hvd.poll, handle))

    def _all_gather(self, tensor: torch.Tensor, counts: Sequence[int] | None) -> list[torch.Tensor]:
        if counts is None:
            counts = self._joined(torch.tensor([len(tensor)])).tolist()
            self.traffic.all_gather([8] * self.size)
        self.traffic.all_gather([count * tensor.element_size() for count in counts])
        return self._gathered_in_turns(tensor, counts)

    def _gather(self, tensor: torch.Tensor, counts: Sequence[int] | None) -> list[torch.Tensor]:
        # Horovod has no gather: each rank sends all of its tensor to rank 0, and nothing to the others.
        if counts is not None and sum(counts) > _MOST_ELEMENTS:
            width, others = tensor.element_size(), self.size - 1
            arriving = [0 if self.rank else count * width for count in counts]
            sent = [len(tensor) * width] + [0] * others
            received = self._all_to_all(tensor.view(torch.uint8), sent, arriving)
            return [] if self.rank else [p.view(tensor.dtype) for p in torch.split(received, arriving)]
        splits = torch.tensor([len(tensor)] + [0] * (self.size - 1), dtype=torch.int32)
        with peer_errors("gather"):
            joined, lengths = self._hvd.alltoall(
                tensor, splits, name=self._name("gather"), process_set=self._set
            )
        return [] if self.rank else list(torch.split(joined, lengths.tolist()))

    def _start_reduce_scatter(self, tensor: torch.Tensor, counts: Sequence[int]) -> Started[torch.Tensor]:
        # Horovod makes only equal parts. For others every rank gets the whole sum and keeps its part.
        is_even = len(set(counts)) == 1
        start = self._hvd.reducescatter_async if is_even else self._hvd.allreduce_async
        with peer_errors("reduce-scatter"):
            handle = start(tensor, op=self._hvd.Sum, name=self._name("reducescatter"), process_set=self._set)
        if is_even:
            self.traffic.reduce_scatter([n * tensor.element_size() for n in counts])
        else:
            self.traffic.all_reduce(num_bytes([tensor]))

        def wait() -> torch.Tensor:
            with peer_errors("reduce-scatter"):
                result: torch.Tensor = self._hvd.synchronize(handle)
            return result if is_even else torch.split(result, list(counts))[self.rank].clone()

        return Started(wait=wait, is_done=partial(self._hvd.poll, handle))

    def _gathered_in_turns(self, tensor: torch.Tensor, counts: Sequence[int]) -> list[torch.Tensor]:
        width = max(1, _TURN_BYTES // tensor.element_size())
        if max(counts) <= width or tensor.device.type == "cuda":
            return list(torch.split(self._joined(tensor), list(counts)))
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

    def _joined(self, tensor: torch.Tensor) -> torch.Tensor:
        """Returns the ranks' tensors end to end, in one tensor."""
        with peer_errors("allgather"):
            result: torch.Tensor = self._hvd.allgather(
                tensor, name=self._name("allgather"), process_set=self._set
            )
        return result

    def _all_to_all(self, joined: torch.Tensor, sent: Sequence[int], arriving: Sequence[int]) -> torch.Tensor:
        received = joined.new_empty(sum(arriving))
        to, of = torch.split(joined, list(sent)), torch.split(received, list(arriving))
        # As many turns on every rank: none knows what the others send to each other.
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
        with peer_errors("broadcast"):
            handles = [
                self._hvd.broadcast_async_(
                    t, self._global(root), name=self._name("broadcast"), process_set=self._set
                )
                for t in tensors
            ]
            for handle in handles:
                self._hvd.synchronize(handle)

    def _barrier(self) -> None:
        with peer_errors("barrier"):
            self._hvd.barrier(process_set=self._set)

    def _global(self, rank: int) -> int:
        """Returns the number in the whole gang of one of these ranks, which Horovod calls it by."""
        ranks: Sequence[int] | None = self._set.ranks
        return rank if ranks is None else ranks[rank]

    def close(self) -> None:
        self._release()
        # This fails every operation that the peers still wait for, so a rank aborts in the same way.
        self._hvd.shutdown()

    abort = close


def _groups(member: Member) -> list[list[int]]:
    """Returns the ranks for which Horovod needs sets: the hosts' first ones, then those of each host.

    Horovod makes sets while it starts, and none for all ranks or for a single one.
    """
    if not member.has_levels:
        return []
    ends = [*member.leaders[1:], member.size]
    hosts = [list(range(begin, end)) for begin, end in zip(member.leaders, ends, strict=True)]
    return [list(member.leaders), *(ranks for ranks in hosts if len(ranks) > 1)]


def check_nccl() -> None:
    """Refuses GPUs to a Horovod that would sum their gradients in the hosts' memory.

    Raises:
        ValueError: This process's Horovod is built without NCCL.
    """
    import horovod.torch as hvd

    if not hvd.nccl_built():
        raise ValueError(
            "useGpu=True with collective 'horovod' needs a Horovod that is built with NCCL, and this one "
            "would send gradients through the hosts' memory; set collective='torch', or build Horovod where "
            "CUDA is, with HOROVOD_GPU_OPERATIONS=NCCL"
        )


def _check_name(member: Member) -> None:
    """Refuses to start a Horovod that would end this process, as other hosts could not connect to it.

    Raises:
        ValueError: The host's own name does not mean its address, and Horovod binds to what it means.
    """
    from horovod import __version__ as version

    if member.local_size == member.size or _MENDED in version:
        return
    if problem := name_problem(member.host):
        raise ValueError(
            f"Horovod {version} binds to what a host's own name means, and {problem}; give the name that "
            "address in /etc/hosts, build Horovod as ringspark's set-up does, or set collective='torch'"
        )


def _cycle(*, is_rare: bool) -> dict[str, str | None]:
    """Returns the setting of Horovod's cycle time; None takes it out of the environment.

    Args:
        is_rare: Whether Horovod only starts and ends the gang.
    """
    from horovod import __version__ as version

    chosen = os.environ.get(_CYCLE_TIME)
    if _CYCLE_MENDED not in version:
        # Another build ends the process when it starts the second time with this and a fusion threshold.
        if chosen is not None:
            _logger.warning(
                "%s=%s is not used: Horovod %s cannot set it twice in a process, as Spark's reused workers "
                "would; build Horovod as ringspark's set-up does",
                _CYCLE_TIME,
                chosen,
                version,
            )
        return {_CYCLE_TIME: None}
    if chosen is None and os.environ.get("HOROVOD_AUTOTUNE", "0") != "0":
        return {_CYCLE_TIME: None}  # this is what Horovod tunes
    return {_CYCLE_TIME: chosen or str(_RARE_CYCLE_MS if is_rare else _CYCLE_MS)}


def _settings(member: Member, door: HorovodDoor, timeout_seconds: float) -> dict[str, str | None]:
    """Returns the settings that Horovod reads from its environment."""
    values: dict[str, str | None] = {
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
        # Gradients come in buckets; fusion would copy several into a buffer of its own, and back.
        "HOROVOD_FUSION_THRESHOLD": os.environ.get("HOROVOD_FUSION_THRESHOLD", "0"),
        "HOROVOD_GLOO_TIMEOUT_SECONDS": str(max(1, int(timeout_seconds))),
    }
    if interface := interface_of(member.host):
        values["HOROVOD_GLOO_IFACE"] = interface
    return values
