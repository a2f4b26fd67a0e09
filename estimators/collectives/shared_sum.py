"""Sums a small tensor over ranks of one host through memory that all of them map.

Between busy processes a library's smallest sum takes as long as a good part of a small network's step,
because threads wake each other. Here each rank copies its tensor to its place, sends every peer a
byte over a Unix socket, waits for a byte from each, and adds up all places in the order of ranks. The bytes
also order the memory accesses, and a peer that ends closes its sockets, which ends the wait of the others.

Invariant: every rank has two places and uses them in turn. A rank that writes to a place for the second time
has heard that all peers began the sum in between, so they have read what stood there before.
"""

from __future__ import annotations

import hmac
import mmap
import os
import secrets
import socket
from abc import ABC, abstractmethod
from collections.abc import Callable
from contextlib import ExitStack, suppress
from functools import partial
from tempfile import mkdtemp
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
# is faster for large tensors of many ranks.
LARGEST_BYTES = 32 << 20

# The most ranks: rank 0 makes a pair of sockets for each two, which are 240 descriptors for so many.
MOST_RANKS = 16

_TOKEN_BYTES = 16

# Memory that all ranks have mapped, and a connected socket for each other rank.
Shared = tuple[mmap.mmap, dict[int, socket.socket]]


class SharingMember(ConnectedMember, ABC):
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

    @abstractmethod
    def _start_sum(self, tensor: torch.Tensor, name: str) -> Callable[[], None]:
        """Like `start_sum`, by the library."""


class SharedSum:
    """One tensor's place in the memory of all ranks, and a socket to each peer."""

    def __init__(self, tensor: torch.Tensor, rank: int, size: int, shared: Shared) -> None:
        """Lays the places out.

        Args:
            tensor: A tensor with the size and dtype of all that are summed.
        """
        self._rank = rank
        memory, self._peers = shared
        self._places = torch.frombuffer(memory, dtype=tensor.dtype).view(2, size, tensor.numel())
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


def is_for_shared_sum(num_bytes: int, num_ranks: int) -> bool:
    """Whether ranks of one host sum a tensor of so many bytes through shared memory."""
    return 1 < num_ranks <= MOST_RANKS and 0 < num_bytes * num_ranks <= LARGEST_BYTES


def may_share(member: Member) -> bool:
    """Whether the ranks share one host, and are few enough, on a system that gives them memory to share."""
    return hasattr(os, "memfd_create") and 1 < member.size == member.local_size <= MOST_RANKS


def open_shared_sum(collective: Collective, tensor: torch.Tensor, timeout: float) -> SharedSum | None:
    """Makes the memory for sums of tensors like this one. Runs on every rank.

    Returns:
        None, on every rank, where the tensor is not for it or a rank cannot get at the others' memory.
    """
    member = collective.member
    is_for_it = tensor.device.type == "cpu" and is_for_shared_sum(tensor.nbytes, member.size)
    if not (may_share(member) and is_for_it):
        return None
    counted = collective.traffic.bytes_sent
    made = None
    with ExitStack() as kept:
        with ExitStack() as meeting:
            link, token = _meet(collective, meeting, timeout)
            # Descriptors or memory may be short too; the library needs none.
            if _agree(collective, link is not None) and link is not None:
                with suppress(OSError):
                    if member.rank == 0:
                        shared = _deal(link, token, member.size, 2 * member.size * tensor.nbytes, kept)
                    else:
                        shared = _receive(link, member.rank, member.size, kept)
                    for peer in shared[1].values():
                        peer.settimeout(timeout)
                    made = SharedSum(tensor, member.rank, member.size, shared)
        # The door is closed by now, which ends the wait of a rank to which rank 0 has dealt nothing.
        is_shared = _agree(collective, made is not None)
        if is_shared:
            kept.pop_all()
    # This belongs to the ranks' meeting, which is not counted.
    collective.traffic.bytes_sent = counted
    return made if is_shared else None


def _agree(collective: Collective, is_able: bool) -> bool:
    """Returns whether all ranks are able."""
    return bool(collective.all_reduce(torch.tensor([int(is_able)]), op="min"))


def _meet(collective: Collective, stack: ExitStack, timeout: float) -> tuple[socket.socket | None, bytes]:
    """Returns rank 0's door, or a link to it from another rank; and a token that only the ranks know.

    Returns None for the socket if there is none: containers may share an address but no files.
    """
    rank = collective.member.rank
    door = _open_door(stack) if rank == 0 else None
    mine = secrets.token_bytes(_TOKEN_BYTES) + door.getsockname().encode() if door else b""
    told = gather_bytes(collective, mine)[0]
    token, path = told[:_TOKEN_BYTES], told[_TOKEN_BYTES:].decode()
    if rank == 0:
        return door, token
    with suppress(OSError):
        link = stack.enter_context(socket.socket(socket.AF_UNIX))
        link.settimeout(timeout)
        link.connect(path)
        link.send(token + bytes([rank]))
        return link, token
    return None, token


def _open_door(stack: ExitStack) -> socket.socket | None:
    """Returns a listening socket in a folder of this user alone; None if there is no place for it."""
    with suppress(OSError):
        # TemporaryDirectory needs descriptors to remove itself.
        folder = mkdtemp(prefix="ringspark-")
        stack.callback(os.rmdir, folder)
        door = stack.enter_context(socket.socket(socket.AF_UNIX))
        path = os.path.join(folder, "door")
        door.bind(path)
        stack.callback(os.unlink, path)
        door.listen(socket.SOMAXCONN)
        # All ranks have connected when it is opened.
        door.setblocking(False)
        return door
    return None


def _deal(door: socket.socket, token: bytes, size: int, num_bytes: int, kept: ExitStack) -> Shared:
    """Makes memory and a pair of sockets for each two ranks; sends each rank its own. Runs on rank 0.

    Args:
        kept: Closes the sockets of this rank, if the ranks do not share the memory.
    """
    with ExitStack() as dealt:
        memory = os.memfd_create("ringspark-sum")
        dealt.callback(os.close, memory)
        os.truncate(memory, num_bytes)
        ends: list[dict[int, socket.socket]] = [{} for _ in range(size)]
        for one in range(size):
            for other in range(one + 1, size):
                pair = socket.socketpair()
                (dealt if one else kept).enter_context(pair[0])
                dealt.enter_context(pair[1])
                ends[one][other], ends[other][one] = pair
        absent = set(range(1, size))
        while absent:
            link, _address = door.accept()
            # A rank whose link fails stays absent; a stranger of this user, who knows no token, is let go.
            with link, suppress(OSError):
                link.setblocking(False)
                told = link.recv(len(token) + 1)
                if hmac.compare_digest(told[:-1], token):
                    own = [end.fileno() for _, end in sorted(ends[told[-1]].items())]
                    socket.send_fds(link, [b"1"], [memory, *own])
                    absent.remove(told[-1])
        return mmap.mmap(memory, num_bytes), ends[0]


def _receive(link: socket.socket, rank: int, size: int, kept: ExitStack) -> Shared:
    """Returns this rank's part of what rank 0 deals; `kept` as for rank 0."""
    _, descriptors, _, _ = socket.recv_fds(link, 1, size)
    if len(descriptors) != size:
        for descriptor in descriptors:
            os.close(descriptor)
        raise OSError(f"rank 0 sent {len(descriptors)} of {size} descriptors")
    memory, *ends = descriptors
    others = [other for other in range(size) if other != rank]
    peers = {
        other: kept.enter_context(socket.socket(fileno=end)) for other, end in zip(others, ends, strict=True)
    }
    try:
        for end in ends:
            # A program that the user's code starts must not hold the connections.
            os.set_inheritable(end, False)
        return mmap.mmap(memory, 0), peers
    finally:
        os.close(memory)
