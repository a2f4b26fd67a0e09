"""Who shares memory, and what becomes of the ranks' operations where they cannot."""

from __future__ import annotations

import json
import os
import resource
import socket
from collections.abc import Iterator
from contextlib import ExitStack, closing, contextmanager, nullcontext, suppress
from pathlib import Path

import pytest
import torch

from ringspark.estimators.collectives import Collective, Member
from ringspark.estimators.collectives.base import gather_bytes
from ringspark.estimators.collectives.rendezvous.client import RendezvousClient
from ringspark.estimators.collectives.shared_memory import (
    MOST_RANKS,
    SharedMemory,
    _deal,
    _receive,
    open_shared_memory,
)
from ringspark.estimators.launch.local import run_spawned
from ringspark.estimators.training.phase import Status

ENOUGH = 12  # descriptors that a gang of three needs to share memory, and to spare
SHORT = (0, 2)  # the rank that deals, and one that is dealt to
SECRET = bytes(32)


def _open() -> set[tuple[int, int]]:
    """The files and sockets that this process has open."""
    found = set()
    for number in os.listdir("/proc/self/fd"):
        with suppress(OSError):  # the listing itself is closed by now
            found.add((os.fstat(int(number)).st_dev, os.fstat(int(number)).st_ino))
    return found


@contextmanager
def _free_descriptors(count: int) -> Iterator[None]:
    """Leaves this process so many descriptors that it may open."""
    old = resource.getrlimit(resource.RLIMIT_NOFILE)
    most = max(int(number) for number in os.listdir("/proc/self/fd")) + count + 1
    taken: list[int] = []
    try:
        resource.setrlimit(resource.RLIMIT_NOFILE, (most, old[1]))
        with suppress(OSError):
            while True:
                taken.append(os.open(os.devnull, os.O_RDONLY))
        for _ in range(count):
            os.close(taken.pop())
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, old)
        for descriptor in taken:
            os.close(descriptor)


def _opens_with_few_descriptors(collective: Collective, device: str, status: Status) -> str:
    """Whether memory was shared, by the rank that is short of descriptors and how many it has."""
    member = collective.member
    is_shared: dict[str, bool] = {}
    for short in SHORT:
        for count in range(ENOUGH + 1):
            status.phase = name = f"{short} has {count}"
            with ExitStack() as stack:
                address = ""
                if member.rank == 0:
                    server = stack.enter_context(closing(collective.open_rendezvous(member, SECRET)))  # type: ignore[attr-defined]
                    address = server.address
                address = gather_bytes(collective, address.encode())[0].decode()
                client = stack.enter_context(closing(RendezvousClient(member, address, SECRET, 30)))
                collective.barrier()
                before = _open()
                with _free_descriptors(count) if member.rank == short else nullcontext():
                    memory = open_shared_memory(client, member, 30)
                if memory is not None:
                    # The memory and sockets to the peers, which a program that this one starts gets not.
                    assert len(_open() - before) == 1 + len(memory._peers)
                    assert not any(peer.get_inheritable() for peer in memory._peers.values())
                    assert not os.get_inheritable(memory._file)
                    assert memory.exchange(bytes([member.rank])) == [b"\0", b"\1", b"\2"]
                    memory.close()
                    del memory
                    is_shared[name] = True
                else:
                    is_shared[name] = False
                collective.barrier()
                assert not _open() - before
    return json.dumps(is_shared)


@pytest.mark.distributed
def test_ranks_without_descriptors_share_no_memory_and_leak_none() -> None:
    first, *others = [json.loads(text) for text in run_spawned(3, "torch", _opens_with_few_descriptors)]
    assert others == [first, first]
    for short in SHORT:
        assert not first[f"{short} has 0"]
        assert first[f"{short} has {ENOUGH}"]


def _sums_without_room(collective: Collective, device: str, status: Status) -> str:
    """A sum for which rank 1 gets no memory, one for which it does, and whether each went through memory."""
    told = []
    for name in ("first", "second"):
        tensor = torch.full((1 << 19,), float(collective.rank))
        is_short = collective.rank == 1 and name == "first"
        # A mapping holds a descriptor.
        with _free_descriptors(0) if is_short else nullcontext():
            collective.start_sum(tensor, name)()
        is_shared = collective._sums[name, tensor.shape, tensor.dtype] is not None  # type: ignore[attr-defined]
        told.append([tensor.unique().tolist(), is_shared])
    return json.dumps(told)


@pytest.mark.distributed
def test_a_rank_that_gets_no_memory_for_a_sum_sends_all_to_the_library() -> None:
    for text in run_spawned(3, "torch", _sums_without_room):
        assert json.loads(text) == [[[3.0], False], [[3.0], True]]


def test_the_sockets_of_the_most_ranks_are_few_beside_the_usual_limit_of_descriptors() -> None:
    assert 2 < MOST_RANKS * (MOST_RANKS - 1) < 1024 // 2


def test_a_stranger_at_the_door_gets_no_memory(tmp_path: Path) -> None:
    with ExitStack() as stack:
        door = stack.enter_context(socket.socket(socket.AF_UNIX))
        door.bind(str(tmp_path / "door"))
        door.listen()
        door.setblocking(False)
        links = []
        for said in (b"", b"\x01", b"wrong\x01", b"token\x01"):
            link = stack.enter_context(socket.socket(socket.AF_UNIX))
            link.connect(str(tmp_path / "door"))
            link.send(said)
            links.append(link)
        # A stack of their own: the memories close what they were dealt.
        with ExitStack() as kept:
            one = SharedMemory(0, _deal(door, b"token", 2, kept), 5)
            for link in links[:-1]:
                assert not link.recv(1)
            other = SharedMemory(1, _receive(links[-1], Member(rank=1, size=2, local_size=2), kept), 5)
            kept.pop_all()
        stack.callback(one.close)
        stack.callback(other.close)
        one.wait(one.tell() - 1)
        other.tell()
        one.wait(1)
