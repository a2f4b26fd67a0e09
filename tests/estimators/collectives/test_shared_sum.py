"""Who shares memory for a sum, and what becomes of the sum where the ranks cannot."""

from __future__ import annotations

import json
import os
import resource
import socket
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from functools import partial
from pathlib import Path

import pytest
import torch

from ringspark.estimators.collectives import Collective, Member
from ringspark.estimators.collectives.local_collective import LocalCollective
from ringspark.estimators.collectives.shared_sum import (
    SharedSum,
    _deal,
    _receive,
    is_for_shared_sum,
    open_shared_sum,
)
from ringspark.estimators.launch.local import run_spawned
from ringspark.estimators.training.phase import Status

ENOUGH = 11  # descriptors that a gang of three needs to share memory, and to spare


def _open() -> int:
    return len(os.listdir("/proc/self/fd"))


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


def _sums_with_few_descriptors(collective: Collective, device: str, status: Status) -> str:
    """Whether memory was shared, by the rank that is short of descriptors and how many it has."""
    shared: dict[str, bool] = {}
    for short in range(collective.size):
        for count in range(ENOUGH + 1):
            status.phase = name = f"{short} has {count}"
            tensor = torch.full((3,), float(collective.rank))
            before = _open()
            with ExitStack() as stack:
                if collective.rank == short:
                    stack.enter_context(_free_descriptors(count))
                collective.start_sum(tensor, name)()
            assert tensor.tolist() == [3.0] * 3
            made = collective._shared_sums[name, tensor.shape, tensor.dtype]  # type: ignore[attr-defined]
            # Its memory and a socket to each peer, which a program that this one starts does not get.
            assert _open() - before == (0 if made is None else 1 + len(made._peers))
            assert made is None or not any(peer.get_inheritable() for peer in made._peers.values())
            shared[name] = made is not None
    return json.dumps(shared)


@pytest.mark.distributed
def test_ranks_without_descriptors_for_shared_memory_sum_by_the_library() -> None:
    first, *others = [json.loads(text) for text in run_spawned(3, "torch", _sums_with_few_descriptors)]
    assert others == [first, first]
    for short in range(3):
        assert not first[f"{short} has 0"]
        assert first[f"{short} has {ENOUGH}"]


def test_ranks_that_do_not_come_are_not_waited_for() -> None:
    collective = LocalCollective()
    collective.member = Member(size=2, local_size=2)
    before = _open()
    assert open_shared_sum(collective, torch.ones(3), 0.1) is None
    assert _open() == before


def test_the_sockets_of_the_most_ranks_are_few_beside_the_usual_limit_of_descriptors() -> None:
    most = max(size for size in range(256) if is_for_shared_sum(4, size))
    assert 2 < most * (most - 1) < 1024 // 2


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
        make = partial(SharedSum, torch.ones(3), size=2)
        one = make(0, shared=_deal(door, b"token", 2, 48, stack))
        for link in links[:-1]:
            assert not link.recv(1)
        other = make(1, shared=_receive(links[-1], 1, 2, stack))
        tensors = torch.tensor([1.0, 2.0, 3.0]), torch.tensor([10.0, 20.0, 30.0])
        one.start(tensors[0])
        other.start(tensors[1])
        one.finish(tensors[0])
        other.finish(tensors[1])
        assert [t.tolist() for t in tensors] == [[11.0, 22.0, 33.0]] * 2
