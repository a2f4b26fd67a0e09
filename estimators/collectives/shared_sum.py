"""Sums a small tensor over ranks of one host through memory that all of them map.

Between busy processes a library's smallest sum takes about half a millisecond, in which threads wake each
other; a step of a small network takes two. Here each rank copies its tensor to its place, sends every peer a
byte over a Unix socket, waits for a byte from each, and adds up all places in the order of ranks. The bytes
also order the memory accesses, and a peer that ends closes its sockets, which ends the wait of the others.

Invariant: every rank has two places and uses them in turn. A rank that writes to a place for the second time
has heard that all peers began the sum in between, so they have read what stood there before.
"""

from __future__ import annotations

import mmap
import os
import socket
from collections.abc import Callable
from contextlib import ExitStack, suppress
from functools import partial
from tempfile import TemporaryDirectory
from typing import cast

import torch

from ringspark.estimators.collectives.base import (
    Collective,
    CollectiveError,
    ConnectedMember,
    gather_bytes,
    num_bytes,
)
from ringspark.estimators.collectives.traffic import Member

# The most bytes that a rank reads for one sum. Each rank reads the tensors of all, so the ring of a library
# is faster for large tensors of many ranks; two ranks sum 16 MiB in 5 ms here, and in 14 ms by Gloo.
LARGEST_BYTES = 32 << 20


class SharingMember(ConnectedMember):
    """Base of the collectives over a network: small sums on one host go through shared memory."""

    def __init__(self, member: Member, timeout_seconds: float) -> None:
        super().__init__(member)
        self._timeout_seconds = timeout_seconds
        self._shared_sums: dict[tuple[str, torch.Size, torch.dtype], SharedSum | None] = {}

    def start_sum(self, tensor: torch.Tensor, name: str) -> Callable[[], None]:
        key = (name, tensor.shape, tensor.dtype)
        if key not in self._shared_sums:
            made = open_shared_sum(cast("Collective", self), tensor, self._timeout_seconds)
            self._shared_sums[key] = made
            if made is not None:
                self.on_leave(made.close)
        self.traffic.all_reduce(num_bytes([tensor]))
        shared = self._shared_sums[key]
        if shared is None:
            return self._start_sum(tensor, name)
        shared.start(tensor)
        return partial(shared.finish, tensor)

    def _start_sum(self, tensor: torch.Tensor, name: str) -> Callable[[], None]:
        """Like `start_sum`, by the library."""
        raise NotImplementedError


class SharedSum:
    """One tensor's place in the memory of all ranks, and a socket to each peer."""

    def __init__(
        self, tensor: torch.Tensor, rank: int, size: int, memory: int, peers: dict[int, socket.socket]
    ) -> None:
        """Maps the memory.

        Args:
            tensor: A tensor with the size and dtype of all that are summed.
            memory: Descriptor of memory that all ranks share; closed here.
            peers: A connected socket for each other rank.
        """
        self._rank = rank
        self._peers = peers
        mapped = torch.frombuffer(mmap.mmap(memory, 0), dtype=tensor.dtype)
        os.close(memory)
        self._places = mapped.view(2, size, tensor.numel())
        self._turn = 0

    def start(self, tensor: torch.Tensor) -> None:
        """Shows the peers this rank's tensor; call `finish` before the next."""
        self._turn ^= 1
        self._places[self._turn, self._rank].copy_(tensor.view(-1))
        for rank, peer in self._peers.items():
            with _peer_errors(rank):
                peer.send(b"1")

    def finish(self, tensor: torch.Tensor) -> None:
        """Waits for the peers and overwrites the tensor with the sum."""
        for rank, peer in self._peers.items():
            with _peer_errors(rank):
                if not peer.recv(1):
                    raise CollectiveError(f"allreduce failed: rank {rank} closed its connection")
        first, *others = self._places[self._turn]
        flat = tensor.view(-1)
        torch.add(first, others[0], out=flat)
        for other in others[1:]:
            flat.add_(other)

    def close(self) -> None:
        """Ends the waits of the peers."""
        for peer in self._peers.values():
            peer.close()


class _peer_errors:  # noqa: N801
    """Like `base.peer_errors` for a socket; a class, because a generator costs more than the call inside."""

    def __init__(self, rank: int) -> None:
        self._rank = rank

    def __enter__(self) -> None:
        return

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _: object) -> None:
        if isinstance(error, OSError):
            raise CollectiveError(
                f"allreduce failed: the connection to rank {self._rank}: {error}"
            ) from error


def open_shared_sum(collective: Collective, tensor: torch.Tensor, timeout: float) -> SharedSum | None:
    """Makes the memory for sums of tensors like this one. Runs on every rank.

    Returns:
        None, on every rank, where the ranks do not share a host's memory or the tensor is not for it.
    """
    member = collective.member
    is_small = 0 < tensor.nbytes * member.size <= LARGEST_BYTES
    is_possible = tensor.device.type == "cpu" and hasattr(os, "memfd_create")
    if not (is_small and is_possible and 1 < member.size == member.local_size):
        return None
    counted = collective.traffic.bytes_sent
    with ExitStack() as stack:
        door = _open_door(stack, timeout) if member.rank == 0 else None
        path = gather_bytes(collective, door.getsockname().encode() if door else b"")[0].decode()
        link = stack.enter_context(socket.socket(socket.AF_UNIX))
        link.settimeout(timeout)
        has_reached = door is not None
        if door is None and path:
            # Containers may share an address but no files.
            with suppress(OSError):
                link.connect(path)
                has_reached = True
        all_reached = int(collective.all_reduce(torch.tensor([int(has_reached)]), op="min"))
        # This belongs to the ranks' meeting, which is not counted.
        collective.traffic.bytes_sent = counted
        if not all_reached:
            return None
        try:
            if door is not None:
                memory, peers = _deal(door, member.size, 2 * member.size * tensor.nbytes)
            else:
                link.send(bytes([member.rank]))
                memory, peers = _receive(link, member.rank, member.size)
        except OSError as error:
            raise CollectiveError(f"the ranks could not share memory: {error}") from error
    for peer in peers.values():
        peer.settimeout(timeout)
    return SharedSum(tensor, member.rank, member.size, memory, peers)


def _open_door(stack: ExitStack, timeout: float) -> socket.socket | None:
    """Returns a listening socket in a folder of this user alone; None if there is no place for it."""
    with suppress(OSError):
        folder = stack.enter_context(TemporaryDirectory(prefix="ringspark-"))
        door = stack.enter_context(socket.socket(socket.AF_UNIX))
        door.bind(os.path.join(folder, "door"))
        door.listen(socket.SOMAXCONN)
        door.settimeout(timeout)
        return door
    return None


def _deal(door: socket.socket, size: int, num_bytes: int) -> tuple[int, dict[int, socket.socket]]:
    """Makes memory and a pair of sockets for each two ranks; sends each rank its own. Runs on rank 0."""
    memory = os.memfd_create("ringspark-sum")
    os.truncate(memory, num_bytes)
    ends: list[dict[int, socket.socket]] = [{} for _ in range(size)]
    for one in range(size):
        for other in range(one + 1, size):
            ends[one][other], ends[other][one] = socket.socketpair()
    for _ in range(1, size):
        link, _address = door.accept()
        with link:
            if not (told := link.recv(1)):
                raise OSError("a rank ended while they met")
            rank = told[0]
            socket.send_fds(link, [b"1"], [memory, *(end.fileno() for _, end in sorted(ends[rank].items()))])
        for end in ends[rank].values():
            end.close()
    return memory, ends[0]


def _receive(link: socket.socket, rank: int, size: int) -> tuple[int, dict[int, socket.socket]]:
    """Returns this rank's part of what rank 0 deals."""
    others = [other for other in range(size) if other != rank]
    _, descriptors, _, _ = socket.recv_fds(link, 1, size)
    if len(descriptors) != size:
        raise OSError(f"rank 0 sent {len(descriptors)} of {size} descriptors")
    memory, *ends = descriptors
    return memory, {other: socket.socket(fileno=end) for other, end in zip(others, ends, strict=True)}
