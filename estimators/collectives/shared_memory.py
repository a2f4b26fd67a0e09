"""Memory that all ranks of one host map, and connections by which each tells the others what it wrote there.

Between busy processes a library's smallest message takes as long as a good part of a small network's step,
because its threads wake each other, and large ones are copied through the system twice. Here each rank
copies its data to its place, sends every peer a byte over a Unix socket, waits for a byte from each, and
reads all places. The bytes also order the memory accesses, and a peer that ends closes its sockets, which
ends the wait of the others.

Invariant: every rank has two places and uses them in turn. A rank that writes to a place for the second time
has heard that all peers wrote once more in between, so they have read what stood there before.
"""

from __future__ import annotations

import hmac
import mmap
import os
import secrets
import socket
from collections.abc import Callable
from contextlib import ExitStack, suppress
from functools import reduce
from tempfile import mkdtemp

import torch

from ringspark.estimators.collectives.base import CollectiveError, ReduceOp
from ringspark.estimators.collectives.rendezvous.client import RendezvousClient
from ringspark.estimators.collectives.traffic import Member

# The most ranks: rank 0 makes a pair of sockets for each two, which are 240 descriptors for so many.
MOST_RANKS = 16

# Bytes that a rank shows at a time; longer data take several turns.
PLACE_BYTES = 1 << 20

# From so many elements on, reading what each rank reduced for all costs less than reducing all oneself.
_SPLIT_ELEMENTS = 16 << 10

_TOKEN_BYTES = 16

_REDUCTIONS: dict[ReduceOp, Callable[..., torch.Tensor]] = {
    "sum": torch.add,
    "max": torch.maximum,
    "min": torch.minimum,
}

# What rank 0 gives to each rank: the memory's descriptor, and a connected socket for each other rank.
Dealt = tuple[int, dict[int, socket.socket]]


class SharedMemory:
    """A file in memory, and a socket to each peer. Every method but `close` runs on every rank."""

    def __init__(
        self, rank: int, memory: int, peers: dict[int, socket.socket], timeout_seconds: float
    ) -> None:
        self._rank = rank
        self._peers = peers
        for peer in self._peers.values():
            peer.settimeout(timeout_seconds)
        self._told = 0  # how often this rank has told the peers that it wrote
        self._heard = dict.fromkeys(self._peers, 0)  # how often each peer has told so
        length = 2 * self.size * PLACE_BYTES
        # Takes the memory now: where it is short, this fails, and writing to it would end the process.
        os.posix_fallocate(memory, 0, length)
        whole = torch.frombuffer(mmap.mmap(memory, length), dtype=torch.uint8)
        self._places = whole.view(2, self.size, PLACE_BYTES)
        self._turn = 0
        self._views: dict[torch.dtype, list[list[torch.Tensor]]] = {}

    @property
    def size(self) -> int:
        """The number of ranks."""
        return 1 + len(self._peers)

    def all_gather(self, tensor: torch.Tensor, *, is_read: bool = True) -> list[torch.Tensor]:
        """Returns every rank's tensor, in the order of ranks; each is one row, of any length.

        Args:
            is_read: Whether this rank wants them; if not, it gets an empty list.
        """
        mine = tensor.view(torch.uint8)
        lengths = [int(n) for n in self._shown(torch.tensor([len(mine)]), torch.int64, 1)]
        gathered = [mine.new_empty(length if is_read else 0) for length in lengths]
        for begin in range(0, max(lengths), PLACE_BYTES):
            places = self._shown(mine[begin : begin + PLACE_BYTES], torch.uint8, PLACE_BYTES)
            for place, whole in zip(places, gathered, strict=True):
                part = whole[begin : begin + PLACE_BYTES]
                part.copy_(place[: len(part)])
        return [whole.view(tensor.dtype) for whole in gathered] if is_read else []

    def all_reduce_(self, tensor: torch.Tensor, op: ReduceOp) -> None:
        """Overwrites a tensor of one row with its reduction over all ranks, in the order of ranks."""
        num_elements = PLACE_BYTES // tensor.element_size()
        for part in torch.split(tensor, num_elements):
            places = self._shown(part, tensor.dtype, len(part))
            if self.size > 2 and len(part) >= _SPLIT_ELEMENTS:
                self._reduce_split(places, part, op)
            else:
                first, second, *others = places
                _REDUCTIONS[op](first, second, out=part)
                for other in others:
                    _REDUCTIONS[op](part, other, out=part)

    def _reduce_split(self, places: list[torch.Tensor], part: torch.Tensor, op: ReduceOp) -> None:
        """Has each rank reduce one slice for all: what a rank reads does not grow with their number."""
        slices = [place.tensor_split(self.size) for place in places]
        mine = slices[self._rank][self._rank]
        # Nobody else reads this slice of this rank's place before it is told.
        mine.copy_(reduce(_REDUCTIONS[op], [own[self._rank] for own in slices]))
        self._wait(self._tell())
        for rank, target in enumerate(part.tensor_split(self.size)):
            target.copy_(slices[rank][rank])

    def _shown(self, data: torch.Tensor, dtype: torch.dtype, length: int) -> list[torch.Tensor]:
        """Shows this rank's data to the peers; returns the first `length` elements of each rank's place."""
        self._turn ^= 1
        if dtype not in self._views:
            self._views[dtype] = [list(turn.view(dtype)) for turn in self._places]
        places = [place[:length] for place in self._views[dtype][self._turn]]
        places[self._rank][: len(data)] = data
        self._wait(self._tell())
        return places

    def _tell(self) -> int:
        """Tells the peers that this rank has written; returns how often it did so."""
        self._told += 1
        for rank, peer in self._peers.items():
            with _peer_errors(rank):
                peer.send(b"1")
        return self._told

    def _wait(self, number: int) -> None:
        """Waits until every peer has told so for the `number`th time."""
        for rank, peer in self._peers.items():
            while self._heard[rank] < number:
                with _peer_errors(rank):
                    heard = len(peer.recv(number - self._heard[rank]))
                if not heard:
                    raise CollectiveError(f"rank {rank} closed its connection")
                self._heard[rank] += heard

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
            raise CollectiveError(f"the connection to rank {self._rank} failed: {error}") from error


def may_share(member: Member) -> bool:
    """Whether the ranks share one host, and are few enough, on a system that gives them memory to share.

    `RINGSPARK_SHARED_MEMORY=0` in the environment of all ranks has them use the network, as on several hosts.
    """
    is_wanted = os.environ.get("RINGSPARK_SHARED_MEMORY") != "0"
    return is_wanted and hasattr(os, "memfd_create") and 1 < member.size == member.local_size <= MOST_RANKS


def open_shared_memory(client: RendezvousClient, member: Member, timeout: float) -> SharedMemory | None:
    """Makes memory that the ranks of one host share. Runs on every rank, once for a rendezvous.

    Returns:
        None, on every rank, where the ranks are on several hosts or one cannot get at the others' memory.
    """
    if not may_share(member):
        return None
    made = None
    with ExitStack() as kept:
        with ExitStack() as meeting:
            link, token = _meet(client, member, meeting, timeout)
            client.meet("sharing/at the door", timeout)
            # Descriptors or memory may be short; the libraries need none.
            if link is not None:
                with suppress(OSError):
                    if member.rank == 0:
                        memory, peers = _deal(link, token, member.size, meeting, kept)
                    else:
                        memory, peers = _receive(link, member, meeting, kept)
                    made = SharedMemory(member.rank, memory, peers, timeout)
        # The door is closed by now, which ends the wait of a rank to which rank 0 has dealt nothing.
        client.set(f"sharing/{member.rank}", b"0" if made is None else b"1")
        client.meet("sharing/open", timeout)
        able = [client.get(f"sharing/{rank}") for rank in range(member.size)]
        if all(told == b"1" for told in able):
            kept.pop_all()
            return made
    return None


def _meet(
    client: RendezvousClient, member: Member, stack: ExitStack, timeout: float
) -> tuple[socket.socket | None, bytes]:
    """Returns rank 0's door, or a link to it from another rank; and a token that only the ranks know.

    Returns None for the socket if there is none: containers may share an address but no files.
    """
    if member.rank == 0:
        door, token = _open_door(stack), secrets.token_bytes(_TOKEN_BYTES)
        client.set("sharing/door", token + door.getsockname().encode() if door else b"")
        return door, token
    client.wait(["sharing/door"], timeout)
    told = client.get("sharing/door") or b""
    token, path = told[:_TOKEN_BYTES], told[_TOKEN_BYTES:].decode()
    if path:
        with suppress(OSError):
            link = stack.enter_context(socket.socket(socket.AF_UNIX))
            link.settimeout(timeout)
            link.connect(path)
            link.send(token + bytes([member.rank]))
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


def _deal(door: socket.socket, token: bytes, size: int, meeting: ExitStack, kept: ExitStack) -> Dealt:
    """Makes memory and a pair of sockets for each two ranks; sends each rank its own. Runs on rank 0.

    Args:
        meeting: Closes the memory's descriptor, which nobody needs once it is mapped.
        kept: Closes this rank's sockets, if the ranks do not share the memory.
    """
    with ExitStack() as dealt:
        memory = os.memfd_create("ringspark")
        meeting.callback(os.close, memory)
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
        return memory, ends[0]


def _receive(link: socket.socket, member: Member, meeting: ExitStack, kept: ExitStack) -> Dealt:
    """Returns this rank's part of what rank 0 deals; `meeting` and `kept` as for rank 0."""
    _, descriptors, _, _ = socket.recv_fds(link, 1, member.size)
    if len(descriptors) != member.size:
        for descriptor in descriptors:
            os.close(descriptor)
        raise OSError(f"rank 0 sent {len(descriptors)} of {member.size} descriptors")
    for descriptor in descriptors:
        # A program that the user's code starts must not hold the memory or the connections.
        os.set_inheritable(descriptor, False)
    memory, *ends = descriptors
    meeting.callback(os.close, memory)
    others = [other for other in range(member.size) if other != member.rank]
    peers = {
        other: kept.enter_context(socket.socket(fileno=end)) for other, end in zip(others, ends, strict=True)
    }
    return memory, peers
