"""A task of the gang's stage. It becomes a rank, works, and returns one row.

A failure of the work becomes the task's row, because Spark would retry an error and bury it in a JVM trace.
"""

from __future__ import annotations

import secrets
import socket
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from itertools import accumulate
from typing import Any

import pyarrow as pa

from ringspark.estimators import run_layout
from ringspark.estimators.collectives import (
    Collective,
    CollectiveError,
    Member,
    RendezvousInfo,
    collective_class,
)
from ringspark.estimators.collectives.network import own_address
from ringspark.estimators.collectives.rendezvous.server import rendezvous_ports
from ringspark.estimators.environment import count_cores
from ringspark.estimators.failures import Failure
from ringspark.estimators.launch.devices import Claim, assign_devices, visible_devices
from ringspark.estimators.launch.heartbeat import Heartbeat, Pulse
from ringspark.estimators.launch.host_allocator import keep_freed_memory
from ringspark.estimators.launch.rank_output import RankOutput
from ringspark.estimators.launch.roster import Offer, await_roster, check_offers, gather_offers, own_executor
from ringspark.estimators.training.phase import Status
from ringspark.models.process_state import print_any_text, release_gpu
from ringspark.pipelines import storage

# The work of a rank: takes the connected collective, the device and the status to update.
Work = Callable[[Collective, str, Status], str]

# A rank must prove that it knows the run's secret before it receives anything.
SECRET_BYTES = 32

SCHEMA = "rank int, result string, failure string"
ARROW_SCHEMA = pa.schema({"rank": pa.int32(), "result": pa.string(), "failure": pa.string()})


def assign_ranks(hosts: Sequence[str]) -> list[Member]:
    """Returns each task's `Member` (its rank and sizes); tasks of one host get consecutive ranks."""
    local_sizes = Counter(hosts)
    first_rank = dict(zip(local_sizes, accumulate(local_sizes.values(), initial=0), strict=False))
    leaders = tuple(first_rank.values())
    seen: Counter[str] = Counter()
    members = []
    for host in hosts:
        local_rank = seen[host]
        seen[host] += 1
        # A rank's "cross" group is the ranks with its local rank, on all hosts that have one.
        cross = [name for name, count in local_sizes.items() if count > local_rank]
        members.append(
            Member(
                rank=first_rank[host] + local_rank,
                size=len(hosts),
                local_rank=local_rank,
                local_size=local_sizes[host],
                cross_rank=cross.index(host),
                cross_size=len(cross),
                host=host,
                leaders=leaders,
            )
        )
    return members


def work_and_leave(
    collective: Collective,
    work: Work,
    device: str,
    status: Status,
    report: Callable[[BaseException], object] = lambda _: None,
) -> str:
    """Runs `work`, then leaves the gang together with the other ranks; on an error, reports and aborts."""
    try:
        result = work(collective, device, status)
        status.phase = "leaving the gang"
        collective.barrier()
    except BaseException as error:
        try:
            # Before the abort, which may wait for operations of a GPU that never end.
            report(error)
        finally:
            collective.abort()
        raise
    collective.close()
    return result


@dataclass(frozen=True, kw_only=True)
class GangTask:
    """The function of the stage. `is_barrier`: whether it is a barrier stage, and not ordinary tasks."""

    collective: str
    work: Work
    use_gpu: bool
    pulse: Pulse
    driver: str
    is_barrier: bool = True
    secret: bytes = field(default_factory=lambda: secrets.token_bytes(SECRET_BYTES), repr=False)

    def __call__(self, batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        for _ in batches:
            pass
        from pyspark import BarrierTaskContext, TaskContext

        context: Any = BarrierTaskContext.get() if self.is_barrier else TaskContext.get()
        # The driver may have given up this rank, and removed the folder.
        with storage.only_where(self.pulse.run_uri, run_layout.OWNER), print_any_text():
            roster: Sequence[Offer] = ()
            if self.is_barrier:
                # An address is "host:port", with an IPv6 host in brackets.
                hosts = [info.address.rpartition(":")[0].strip("[]") for info in context.getTaskInfos()]
            else:
                roster = await_roster(self.pulse, self._offer(context))
                hosts = [offer.claim.host for offer in roster]
            if not hosts:
                return
            member = assign_ranks(hosts)[context.partitionId()]
            with RankOutput(self.pulse, member.rank, member.host), keep_freed_memory():
                result, failure = self._run(context, member, roster)
        # Not earlier: until here the frames of the work, and of its error, hold tensors.
        release_gpu()
        row = {"rank": member.rank, "result": result, "failure": failure.to_json() if failure else None}
        yield pa.RecordBatch.from_pylist([row], ARROW_SCHEMA)

    def _run(
        self, context: Any, member: Member, roster: Sequence[Offer]
    ) -> tuple[str | None, Failure | None]:
        import torch

        status = Status()
        # A task owns only the cores that Spark gave it; torch would take all cores of the host.
        threads = torch.get_num_threads()
        torch.set_num_threads(count_cores(context))
        task: int = context.partitionId()
        heartbeat = Heartbeat(self.pulse, status, member.rank, member.host, task)

        def report(error: BaseException) -> Failure:
            from_peer = isinstance(error, CollectiveError)
            return heartbeat.fail(Failure.of(error, member.rank, status.phase, from_peer=from_peer))

        with heartbeat:
            try:
                return self._connect_and_work(context, member, roster, status, report), None
            # SystemExit too, because sys.exit() in user code would end the Python worker silently.
            except (Exception, SystemExit) as error:
                return None, report(error)
            finally:
                torch.set_num_threads(threads)

    def _connect_and_work(
        self,
        context: Any,
        member: Member,
        roster: Sequence[Offer],
        status: Status,
        report: Callable[[BaseException], object],
    ) -> str:
        kind = collective_class(self.collective)
        status.phase = "opening the rendezvous"
        at, rendezvous = member, None
        is_spread = member.local_size < member.size
        # Spark's allGather takes a second. Ranks of one host that share no devices do without it.
        must_gather = not roster and (self.use_gpu or is_spread)
        ports = [0] if must_gather else rendezvous_ports(self.secret)
        own = Offer(task=context.partitionId(), claim=Claim(host=member.host))
        roster = roster or [own]
        try:
            try:
                if must_gather:
                    if is_spread:
                        at = replace(member, host=own_address(member.host, self.driver))
                    own = replace(own, claim=self._claim(context, member.host))
                if member.rank == 0:
                    rendezvous = kind.open_rendezvous(at, self.secret, ports)
            except Exception as error:
                if not must_gather:
                    raise
                own = replace(own, problem=str(error))
            if must_gather:
                own = replace(own, address=rendezvous.address if rendezvous else "")
                roster = gather_offers(own, context)
            check_offers(roster, context.partitionId())
            # Rank 0 is the first of its host, and hosts have the order of their first task.
            host = roster[0].claim.host
            address = roster[0].address or f"{host}:{','.join(map(str, ports))}"
            status.phase = "choosing the devices"
            device = self._device([offer.claim for offer in roster], context)
            status.phase = f"connecting by {self.collective}"
            info = RendezvousInfo(
                address=address,
                secret=self.secret,
                timeout_seconds=self.pulse.timeout_seconds,
                use_gpu=self.use_gpu,
            )
            collective = kind.connect(at, info)
            return work_and_leave(collective, self.work, device, status, report)
        finally:
            if rendezvous is not None:
                rendezvous.close()

    def _offer(self, context: Any) -> Offer:
        host = own_address(socket.gethostname(), self.driver)
        offer = Offer(
            task=context.partitionId(),
            attempt=context.attemptNumber(),
            claim=Claim(host=host),
            executor=own_executor(),
        )
        try:
            return replace(offer, claim=self._claim(context, host))
        except Exception as error:
            return replace(offer, problem=str(error))

    def _claim(self, context: Any, host: str) -> Claim:
        if not self.use_gpu:
            return Claim(host=host)
        gpu = context.resources().get("gpu")
        addresses = tuple(gpu.addresses) if gpu else ()
        return Claim(host=host, addresses=addresses, visible=visible_devices())

    def _device(self, claims: list[Claim], context: Any) -> str:
        if not self.use_gpu:
            return "cpu"
        import torch

        device: str = assign_devices(claims)[context.partitionId()]
        torch.cuda.set_device(device)
        return device
