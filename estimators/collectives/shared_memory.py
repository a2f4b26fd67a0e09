"""Collective operations through memory that all ranks of one host map, synchronized by sockets.

Each rank copies its data to its slot, sends every peer a byte over a Unix socket, waits for a byte from each
peer, and reads all slots. The bytes also order memory accesses. Every rank alternates between two slots, so
that it never overwrites data that a peer still reads.
"""

from __future__ import annotations

import hmac
import logging
import mmap
import os
import secrets
import socket
import struct
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, suppress
from functools import reduce

import torch

from ringspark.estimators.collectives.base import REDUCTIONS, CollectiveError, ReduceOp
from ringspark.estimators.collectives.rendezvous.client import RendezvousClient
from ringspark.estimators.collectives.traffic import Member

# Largest number of ranks: rank 0 makes a pair of sockets for each two ranks, which are 240 descriptors.
MOST_RANKS = 16

# Bytes of a slot after its header; longer data need several turns.
_SLOT_BYTES, _HEAD_BYTES = 1 << 20, 64
_HEAD = struct.Struct("qq")
_GATHER, _REDUCE = 1, 2
REMEDY = "build the same model, with the same trainable parameters, on every rank"

# From this number of elements on, each rank reduces one slice and reads the other ranks' slices.
_SPLIT_ELEMENTS = 16 << 10

_TOKEN_BYTES = 16

_logger = logging.getLogger(__name__)

# The memory's descriptor, and a connected socket for each other rank.
Endpoint = tuple[int, dict[int, socket.socket]]


class SharedMemory:
    """Memory of all ranks, and a socket to each peer. Every method except `close` runs on every rank.

    Tensors are 1-D. A tensor longer than a slot is written in several turns; each turn also tells the peers
    its total length.
    """

    def __init__(
        self, rank: int, memory: int, peers: dict[int, socket.socket], timeout_seconds: float
    ) -> None:
        self._rank = rank
        self._peers = peers
        for peer in self._peers.values():
            peer.settimeout(timeout_seconds)
        self._num_signals = 0  # number of signals to the peers
        self._heard = dict.fromkeys(self._peers, 0)  # number of signals from each peer
        num_bytes = 2 * self.size * (_HEAD_BYTES + _SLOT_BYTES)
        # Allocates the memory now: if memory is short, this fails, but a later write would end the process.
        os.posix_fallocate(memory, 0, num_bytes)
        self._memory = mmap.mmap(memory, num_bytes)
        whole = torch.frombuffer(self._memory, dtype=torch.uint8)
        self._places = whole.view(2, self.size, _HEAD_BYTES + _SLOT_BYTES)[:, :, _HEAD_BYTES:]
        self._turn = 0
        self._views: dict[torch.dtype, list[list[torch.Tensor]]] = {}

    @property
    def size(self) -> int:
        return 1 + len(self._peers)

    def all_gather(self, tensor: torch.Tensor, *, is_read: bool = True) -> list[torch.Tensor]:
        """Returns every rank's tensor, in rank order, or [] on a rank that does not read it."""
        mine = tensor.view(torch.uint8)
        gathered: list[torch.Tensor] = []
        begin, longest = 0, 1
        while begin < longest:
            places = self._write(mine[begin : begin + _SLOT_BYTES], len(mine), _GATHER)
            lengths = self._lengths(_GATHER)
            longest = max(lengths)
            if is_read:
                gathered = gathered or [mine.new_empty(length) for length in lengths]
                for place, whole in zip(places, gathered, strict=True):
                    part = whole[begin : begin + _SLOT_BYTES]
                    part.copy_(place[: len(part)])
            begin += _SLOT_BYTES
        return [whole.view(tensor.dtype) for whole in gathered]

    def all_to_all(self, pieces: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        shown = [self.all_gather(piece, is_read=rank == self._rank) for rank, piece in enumerate(pieces)]
        return shown[self._rank]

    def all_reduce_(self, tensor: torch.Tensor, op: ReduceOp) -> None:
        for part, places in self._chunks(tensor):
            if self.size > 2 and len(part) >= _SPLIT_ELEMENTS:
                self._reduce_split(places, part, op)
            else:
                _reduce(places, part, op)

    def reduce_scatter(self, tensor: torch.Tensor, begin: int, end: int) -> torch.Tensor:
        own, at = tensor.new_empty(end - begin), 0
        for part, places in self._chunks(tensor):
            low, high = max(at, begin), min(at + len(part), end)
            if low < high:
                theirs = [place[low - at : high - at] for place in places]
                _reduce(theirs, own[low - begin : high - begin], "sum")
            at += len(part)
        return own

    def _chunks(self, tensor: torch.Tensor) -> Iterator[tuple[torch.Tensor, list[torch.Tensor]]]:
        for part in torch.split(tensor, _SLOT_BYTES // tensor.element_size()):
            places = self._write(part, tensor.nbytes, _REDUCE)
            lengths = self._lengths(_REDUCE)
            if min(lengths) < max(lengths):
                sizes = ", ".join(f"{length} on rank {rank}" for rank, length in enumerate(lengths))
                raise ValueError(f"the ranks reduce tensors of different sizes, in bytes: {sizes}; {REMEDY}")
            yield part, [place[: len(part)] for place in places]

    def _reduce_split(self, places: list[torch.Tensor], part: torch.Tensor, op: ReduceOp) -> None:
        """Reduces all ranks' data `places` into `part`; each rank computes one slice and copies the rest."""
        slices = [place.tensor_split(self.size) for place in places]
        mine = slices[self._rank][self._rank]
        # Other ranks read this slice only after the next signal.
        mine.copy_(reduce(REDUCTIONS[op], [own[self._rank] for own in slices]))
        self._synchronize()
        for rank, target in enumerate(part.tensor_split(self.size)):
            target.copy_(slices[rank][rank])

    def _write(self, data: torch.Tensor, num_bytes: int, kind: int) -> list[torch.Tensor]:
        self._turn ^= 1
        if data.dtype not in self._views:
            self._views[data.dtype] = [list(turn.view(data.dtype)) for turn in self._places]
        places = self._views[data.dtype][self._turn]
        places[self._rank][: len(data)] = data
        _HEAD.pack_into(self._memory, self._head(self._rank), kind, num_bytes)
        self._synchronize()
        return places

    def _lengths(self, kind: int) -> list[int]:
        heads = [_HEAD.unpack_from(self._memory, self._head(rank)) for rank in range(self.size)]
        if any(head[0] != kind for head in heads):
            raise ValueError(f"some ranks reduce a tensor while other ranks gather one; {REMEDY}")
        return [length for _, length in heads]

    def _head(self, rank: int) -> int:
        return (self._turn * self.size + rank) * (_HEAD_BYTES + _SLOT_BYTES)

    def _synchronize(self) -> None:
        """Sends every peer a signal, and waits for as many signals from it as it has got."""
        self._num_signals += 1
        rank = self._rank
        try:
            for rank, peer in self._peers.items():  # noqa: B007 (the error names it)
                peer.send(b"1")
            for rank, peer in self._peers.items():
                while missing := self._num_signals - self._heard[rank]:
                    if not (heard := len(peer.recv(missing))):
                        raise CollectiveError(f"rank {rank} closed its connection")
                    self._heard[rank] += heard
        except OSError as error:
            raise CollectiveError(f"the connection to rank {rank} failed: {error}") from error

    def close(self) -> None:
        for peer in self._peers.values():
            peer.close()


def _reduce(places: list[torch.Tensor], out: torch.Tensor, op: ReduceOp) -> None:
    first, second, *others = places
    reduction = REDUCTIONS[op]
    reduction(first, second, out=out)
    for other in others:
        reduction(out, other, out=out)


def open_shared_memory(client: RendezvousClient, member: Member, timeout: float) -> SharedMemory | None:
    """Makes memory that 2 to `MOST_RANKS` ranks of one host share; None if they cannot. Runs on every rank.

    `RINGSPARK_SHARED_MEMORY=0` in the environment of all ranks disables it.
    """
    is_wanted = os.environ.get("RINGSPARK_SHARED_MEMORY") != "0" and hasattr(os, "memfd_create")
    if not is_wanted or not 1 < member.size == member.local_size <= MOST_RANKS:
        return None
    made = None
    with ExitStack() as kept:
        with ExitStack() as setup:
            gather = lambda mine: client.all_gather("sharing/door", mine, timeout)  # noqa: E731
            link, token = meet_on_host(gather, member.rank, setup, timeout)
            client.meet("sharing/at the door", timeout)
            # Without descriptors or memory, the ranks use a library.
            if link is not None:
                with suppress(OSError):
                    if member.rank == 0:
                        memory, peers = _send_endpoints(link, token, member.size, setup, kept)
                    else:
                        memory, peers = _receive_endpoint(link, member, setup, kept)
                    made = SharedMemory(member.rank, memory, peers, timeout)
        # The listener is closed by now, which ends the wait of a rank to which rank 0 has sent nothing.
        if all(client.all_gather("sharing/open", b"" if made is None else b"1", timeout)):
            kept.pop_all()
            return made
    if member.rank == 0:
        _logger.warning("the ranks of %s cannot share memory; they communicate over the network", member.host)
    return None


def meet_on_host(
    gather: Callable[[bytes], Sequence[bytes]], rank: int, stack: ExitStack, timeout: float
) -> tuple[socket.socket | None, bytes]:
    """Returns a socket and a token that only the ranks know; `gather` gathers bytes from all ranks.

    On rank 0 the socket listens. On another rank it is connected to rank 0, or None if that failed:
    containers may share an address but not a network namespace.
    """
    door = None if rank else open_listener(stack)
    answer = gather(secrets.token_bytes(_TOKEN_BYTES) + door.getsockname() if door else b"")[0]
    token, name = answer[:_TOKEN_BYTES], answer[_TOKEN_BYTES:]
    return door if rank == 0 else _connect_to_listener(name, token, rank, stack, timeout), token


def _connect_to_listener(
    name: bytes, token: bytes, rank: int, stack: ExitStack, timeout: float
) -> socket.socket | None:
    """Connects to rank 0's listener and sends the token; returns the connection, or None if that fails."""
    if name:
        with suppress(OSError):
            link = stack.enter_context(socket.socket(socket.AF_UNIX))
            link.settimeout(timeout)
            link.connect(name)
            if _leads_to_own_user(link):
                link.send(token + bytes([rank]))
                return link
    return None


def open_listener(stack: ExitStack) -> socket.socket | None:
    """Returns a listening socket without a file, so a killed rank leaves no file; None if that fails."""
    with suppress(OSError):
        door = stack.enter_context(socket.socket(socket.AF_UNIX))
        # For an empty address Linux picks a unique abstract name.
        door.bind("")
        door.listen(socket.SOMAXCONN)
        # Rank 0 accepts only after all ranks have connected, so accept never has to wait.
        door.setblocking(False)
        return door
    return None


def _leads_to_own_user(link: socket.socket) -> bool:
    _, user, _ = struct.unpack("iII", link.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12))
    return bool(user == os.geteuid())


def _send_endpoints(
    door: socket.socket, token: bytes, size: int, setup: ExitStack, kept: ExitStack
) -> Endpoint:
    """Makes the memory and a socket pair per pair of ranks; sends each rank its endpoint. Runs on rank 0.

    The other ranks connect to the listener `door`. `setup` will close the memory's file descriptor. `kept`
    will close rank 0's sockets if the ranks do not share memory in the end.
    """
    with ExitStack() as dealt:
        memory = os.memfd_create("ringspark")
        setup.callback(os.close, memory)
        ends: list[dict[int, socket.socket]] = [{} for _ in range(size)]
        for one in range(size):
            for other in range(one + 1, size):
                pair = socket.socketpair()
                (dealt if one else kept).enter_context(pair[0])
                dealt.enter_context(pair[1])
                ends[one][other], ends[other][one] = pair
        send_descriptors(
            door,
            token,
            {
                rank: [memory, *(end.fileno() for _, end in sorted(ends[rank].items()))]
                for rank in range(1, size)
            },
        )
        return memory, ends[0]


def send_descriptors(door: socket.socket, token: bytes, descriptors: Mapping[int, Sequence[int]]) -> None:
    """Sends each rank its descriptors. Runs on rank 0 once all ranks have connected."""
    absent = set(descriptors)
    while absent:
        link, _address = door.accept()
        # A rank whose link fails stays absent; a stranger of this user, who knows no token, is disconnected.
        with link, suppress(OSError):
            if not _leads_to_own_user(link):
                continue
            link.setblocking(False)
            hello = link.recv(len(token) + 1)
            if hmac.compare_digest(hello[:-1], token):
                socket.send_fds(link, [b"1"], descriptors[hello[-1]])
                absent.remove(hello[-1])


def receive_descriptors(link: socket.socket, count: int) -> list[int]:
    _, descriptors, _, _ = socket.recv_fds(link, 1, count)
    if len(descriptors) != count:
        for descriptor in descriptors:
            os.close(descriptor)
        raise OSError(f"rank 0 sent {len(descriptors)} of {count} descriptors")
    for descriptor in descriptors:
        # A child process of the user's code must not inherit the memory or the connections.
        os.set_inheritable(descriptor, False)
    return descriptors


def _receive_endpoint(link: socket.socket, member: Member, setup: ExitStack, kept: ExitStack) -> Endpoint:
    memory, *ends = receive_descriptors(link, member.size)
    setup.callback(os.close, memory)
    others = [other for other in range(member.size) if other != member.rank]
    peers = {
        other: kept.enter_context(socket.socket(fileno=end)) for other, end in zip(others, ends, strict=True)
    }
    return memory, peers
