"""Which ranks share memory, and how they fall back if they cannot."""

import os
import resource
import signal
import socket
import tempfile
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, closing, contextmanager, nullcontext, suppress
from typing import Any

import pytest
import torch
from ranks import run_ranks

from ringspark.estimators.collectives import Collective, Member
from ringspark.estimators.collectives.base import gather_bytes
from ringspark.estimators.collectives.rendezvous.client import RendezvousClient
from ringspark.estimators.collectives.shared_memory import (
    _SLOT_BYTES,
    _SPLIT_ELEMENTS,
    SharedMemory,
    _receive_endpoint,
    _send_endpoints,
    open_listener,
    open_shared_memory,
)

ENOUGH = 12  # descriptors, more than a gang of three needs to share memory
SHORT = (0, 2)  # the rank that creates the memory, and one that receives it
SECRET = bytes(32)


def _open() -> set[tuple[int, int]]:
    """Returns the open files and sockets of this process."""
    found = set()
    for number in os.listdir("/proc/self/fd"):
        with suppress(OSError):  # the descriptor of listdir is closed
            found.add((os.fstat(int(number)).st_dev, os.fstat(int(number)).st_ino))
    return found


@contextmanager
def _free_descriptors(count: int) -> Iterator[None]:
    """Leaves this process `count` free file descriptors."""
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


def _opens_with_few_descriptors(collective: Collective) -> Any:
    """Returns whether memory was shared, by the rank short of descriptors and its count."""
    member = collective.member
    is_shared: dict[str, bool] = {}
    for short in SHORT:
        for count in range(ENOUGH + 1):
            name = f"{short} has {count}"
            with ExitStack() as stack:
                address = ""
                if member.rank == 0:
                    server = stack.enter_context(closing(collective.open_rendezvous(member, SECRET)))
                    address = server.address
                address = gather_bytes(collective, address.encode())[0].decode()
                client = stack.enter_context(closing(RendezvousClient(member, address, SECRET, 30)))
                collective.barrier()
                before = _open()
                with _free_descriptors(count) if member.rank == short else nullcontext():
                    memory = open_shared_memory(client, member, 30)
                if memory is not None:
                    # The memory and the sockets to the peers; child processes do not inherit them.
                    assert len(_open() - before) == 1 + len(memory._peers)
                    assert not any(peer.get_inheritable() for peer in memory._peers.values())
                    shown = memory.all_gather(torch.tensor([member.rank]))
                    assert [piece.item() for piece in shown] == [0, 1, 2]
                    memory.close()
                    del memory
                    is_shared[name] = True
                else:
                    is_shared[name] = False
                collective.barrier()
                assert not _open() - before
    return is_shared


@pytest.mark.distributed
def test_ranks_without_descriptors_share_no_memory_and_leak_none():
    first, *others = run_ranks(3, "torch", _opens_with_few_descriptors)
    assert others == [first, first]
    for short in SHORT:
        assert not first[f"{short} has 0"]
        assert first[f"{short} has {ENOUGH}"]


def _reduces(collective: Collective) -> Any:
    """Returns whether reductions of up to several slots are exact and leave their input unchanged."""
    memory = collective._memory
    rank, size = collective.rank, collective.size
    told = []
    for length in (1, 7, _SPLIT_ELEMENTS + 5, 3 * _SLOT_BYTES // 8 + 11):
        numbers = torch.arange(length, dtype=torch.float64)
        mine = numbers * (rank + 1)
        total = numbers * sum(range(1, size + 1))
        told.append(collective.all_reduce(mine).equal(total))
        told.append(collective.all_reduce(mine, "max").equal(numbers * size))
        told.append(collective.all_reduce(-mine, "min").equal(-numbers * size))
        wait = collective.start_sum(copy := mine.clone(), "sum")
        wait()
        told += [copy.equal(total), mine.equal(numbers * (rank + 1))]
    turned = torch.arange(6).view(2, 3).t()
    told.append(collective.all_reduce(turned).equal(size * turned))
    told.append(collective.all_reduce(torch.tensor(rank)).item() == sum(range(size)))
    assert memory is not None
    return told


@pytest.mark.distributed
@pytest.mark.parametrize("size", [2, 3])
def test_tensors_of_any_length_are_reduced_place_by_place(size):
    for text in run_ranks(size, "torch", _reduces):
        assert all(text), text


def _differ(collective: Collective) -> Any:
    """Returns the errors of a rank whose peer reduces other sizes, or gathers instead."""
    memory = collective._memory
    told = []
    for act in (
        lambda: memory.all_reduce_(torch.ones(3 + 2 * collective.rank), "sum"),
        lambda: memory.all_gather(torch.ones(1)) if collective.rank else collective.all_reduce(torch.ones(1)),
    ):
        with pytest.raises(ValueError, match="the same model, with the same trainable parameters") as caught:
            act()
        told.append(str(caught.value))
    return told


def _receives_less(collective: Collective) -> str:
    """Returns the error of rank 1; torch would silently broadcast the single number."""
    tensor = torch.zeros(1 + 2 * collective.rank)
    if collective.rank == 0:
        collective.broadcast([tensor])
        return ""
    with pytest.raises(ValueError, match="build the same model") as caught:
        collective.broadcast([tensor])
    return str(caught.value)


@pytest.mark.distributed
def test_a_rank_that_is_sent_a_tensor_of_another_size_is_told_so():
    _, message = run_ranks(2, "torch", _receives_less)
    assert message.startswith(
        "rank 0 sends a tensor of 1 elements, but rank 1 expects 3 elements; build the same model"
    )


@pytest.mark.distributed
def test_ranks_that_sum_different_tensors_are_told_so_instead_of_wrong_numbers():
    """The slots still hold earlier data of a peer."""
    for sizes, kinds in run_ranks(2, "torch", _differ):
        assert sizes.startswith(
            "the ranks reduce tensors of different sizes, in bytes: 12 on rank 0, 20 on rank 1;"
        )
        assert kinds.startswith("some ranks reduce a tensor while other ranks gather one; build")


def test_a_rank_killed_at_the_door_leaves_no_file(tmp_path, monkeypatch):
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    if not (child := os.fork()):
        with suppress(BaseException), ExitStack() as stack:
            if open_listener(stack) is not None:
                os.kill(os.getpid(), signal.SIGKILL)
        os._exit(1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == -signal.SIGKILL
    assert not list(tmp_path.iterdir())


def _is_sharing(collective: Collective) -> bool:
    return collective._memory is not None


@pytest.mark.distributed
def test_ranks_of_one_host_share_memory_unless_the_environment_forbids_it(monkeypatch):
    assert run_ranks(2, "torch", _is_sharing) == [True, True]
    monkeypatch.setenv("RINGSPARK_SHARED_MEMORY", "0")
    assert run_ranks(2, "torch", _is_sharing) == [False, False]


def test_a_stranger_at_the_door_gets_no_memory(tmp_path):
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
        one = SharedMemory(0, *_send_endpoints(door, b"token", 2, stack, stack), 5)
        for link in links[:-1]:
            assert not link.recv(1)
        member = Member(rank=1, size=2, local_size=2)
        other = SharedMemory(1, *_receive_endpoint(links[-1], member, stack, stack), 5)
        with ThreadPoolExecutor(2) as ranks:
            sums = [ranks.submit(collect.all_gather, torch.ones(3)) for collect in (one, other)]
            assert [len(each.result()) for each in sums] == [2, 2]


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can become another user")
def test_another_user_gets_no_memory_though_it_knows_the_token():
    with ExitStack() as stack:
        door = open_listener(stack)
        link = stack.enter_context(socket.socket(socket.AF_UNIX))
        os.seteuid(65534)
        try:
            link.connect(door.getsockname())
        finally:
            os.seteuid(0)
        link.send(b"token\x01")
        # No other process has connected.
        with pytest.raises(BlockingIOError):
            _send_endpoints(door, b"token", 2, stack, stack)
