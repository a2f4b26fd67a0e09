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

from ringspark.estimators.collectives.base import CollectiveError, ReduceOp
from ringspark.estimators.collectives.rendezvous.client import RendezvousClient
from ringspark.estimators.collectives.traffic import Member

# The most ranks: rank 0 makes a pair of sockets for each two, which are 240 descriptors for so many.
MOST_RANKS = 16

# Bytes that a rank shows at a time, after a head that says of what; longer data take several turns.
_PIECE_BYTES, _HEAD_BYTES = 1 << 20, 64
_HEAD = struct.Struct("qq")
_GATHER, _REDUCE = 1, 2
REMEDY = "build the same model, with the same trainable parameters, on every rank"

# From so many elements on, reading what each rank reduced for all costs less than reducing all oneself.
_SPLIT_ELEMENTS = 16 << 10

TOKEN_BYTES = 16

_REDUCTIONS: dict[ReduceOp, Callable[..., torch.Tensor]] = {
    "sum": torch.add,
    "max": torch.maximum,
    "min": torch.minimum,
}

_logger = logging.getLogger(__name__)

# One rank's share: the memory's descriptor, and a connected socket for each other rank.
Dealt = tuple[int, dict[int, socket.socket]]


class SharedMemory:
    """Memory of all ranks, and a socket to each peer. Every method but `close` runs on every rank.

    Tensors have one dimension. One that is longer than a place is shown in turns; its length is told in each.
    """

    def __init__(
        self, rank: int, memory: int, peers: dict[int, socket.socket], timeout_seconds: float
    ) -> None:
        self._rank = rank
        self._peers = peers
        for peer in self._peers.values():
            peer.settimeout(timeout_seconds)
        self._told = 0  # how often this rank has told the peers that it wrote
        self._heard = dict.fromkeys(self._peers, 0)  # how often each peer has told so
        # Takes the memory now: where it is short, this fails, and writing to it would end the process.
        os.posix_fallocate(memory, 0, shared_bytes(self.size))
        self._memory = mmap.mmap(memory, shared_bytes(self.size))
        whole = torch.frombuffer(self._memory, dtype=torch.uint8)
        self._places = whole.view(2, self.size, _HEAD_BYTES + _PIECE_BYTES)[:, :, _HEAD_BYTES:]
        self._turn = 0
        self._views: dict[torch.dtype, list[list[torch.Tensor]]] = {}

    @property
    def size(self) -> int:
        """The number of ranks."""
        return 1 + len(self._peers)

    def all_gather(self, tensor: torch.Tensor, *, is_read: bool = True) -> list[torch.Tensor]:
        """Returns every rank's tensor, in the order of ranks; the lengths may differ.

        Args:
            is_read: Whether this rank wants them; if not, it gets an empty list.
        """
        mine = tensor.view(torch.uint8)
        gathered: list[torch.Tensor] = []
        begin, longest = 0, 1
        while begin < longest:
            places = self._shown(mine[begin : begin + _PIECE_BYTES], len(mine), _GATHER)
            lengths = self._lengths(_GATHER)
            longest = max(lengths)
            if is_read:
                gathered = gathered or [mine.new_empty(length) for length in lengths]
                for place, whole in zip(places, gathered, strict=True):
                    part = whole[begin : begin + _PIECE_BYTES]
                    part.copy_(place[: len(part)])
            begin += _PIECE_BYTES
        return [whole.view(tensor.dtype) for whole in gathered]

    def all_to_all(self, pieces: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """Sends each rank its own piece; returns those for this rank, in the order of ranks."""
        shown = [self.all_gather(piece, is_read=rank == self._rank) for rank, piece in enumerate(pieces)]
        return shown[self._rank]

    def all_reduce_(self, tensor: torch.Tensor, op: ReduceOp) -> None:
        """Overwrites a tensor with its reduction over all ranks, in the order of ranks."""
        for part, places in self._pieces(tensor):
            if self.size > 2 and len(part) >= _SPLIT_ELEMENTS:
                self._reduce_split(places, part, op)
            else:
                _reduce(places, part, op)

    def reduce_scatter(self, tensor: torch.Tensor, begin: int, end: int) -> torch.Tensor:
        """Returns this rank's part, from `begin` to `end`, of the sum over all ranks."""
        own, at = tensor.new_empty(end - begin), 0
        for part, places in self._pieces(tensor):
            low, high = max(at, begin), min(at + len(part), end)
            if low < high:
                theirs = [place[low - at : high - at] for place in places]
                _reduce(theirs, own[low - begin : high - begin], "sum")
            at += len(part)
        return own

    def _pieces(self, tensor: torch.Tensor) -> Iterator[tuple[torch.Tensor, list[torch.Tensor]]]:
        """Yields this rank's tensor piece by piece, each with what every rank has in its place."""
        for part in torch.split(tensor, _PIECE_BYTES // tensor.element_size()):
            places = self._shown(part, tensor.nbytes, _REDUCE)
            lengths = self._lengths(_REDUCE)
            if min(lengths) < max(lengths):
                told = ", ".join(f"{length} on rank {rank}" for rank, length in enumerate(lengths))
                raise ValueError(f"the ranks sum tensors of different sizes in bytes: {told}; {REMEDY}")
            yield part, [place[: len(part)] for place in places]

    def _reduce_split(self, places: list[torch.Tensor], part: torch.Tensor, op: ReduceOp) -> None:
        """Has each rank reduce one slice for all: what a rank reads does not grow with their number."""
        slices = [place.tensor_split(self.size) for place in places]
        mine = slices[self._rank][self._rank]
        # Nobody else reads this slice of this rank's place before it is told.
        mine.copy_(reduce(_REDUCTIONS[op], [own[self._rank] for own in slices]))
        self._wait(self._tell())
        for rank, target in enumerate(part.tensor_split(self.size)):
            target.copy_(slices[rank][rank])

    def _shown(self, data: torch.Tensor, num_bytes: int, kind: int) -> list[torch.Tensor]:
        """Shows a piece of this rank's data to the peers; returns the place of each rank.

        Args:
            num_bytes: Of all pieces together.
        """
        self._turn ^= 1
        if data.dtype not in self._views:
            self._views[data.dtype] = [list(turn.view(data.dtype)) for turn in self._places]
        places = self._views[data.dtype][self._turn]
        places[self._rank][: len(data)] = data
        _HEAD.pack_into(self._memory, self._head(self._rank), kind, num_bytes)
        self._wait(self._tell())
        return places

    def _lengths(self, kind: int) -> list[int]:
        """Returns how many bytes each rank has, once it knows that all do the same."""
        heads = [_HEAD.unpack_from(self._memory, self._head(rank)) for rank in range(self.size)]
        if any(head[0] != kind for head in heads):
            raise ValueError(f"some ranks sum while others gather; {REMEDY}")
        return [length for _, length in heads]

    def _head(self, rank: int) -> int:
        return (self._turn * self.size + rank) * (_HEAD_BYTES + _PIECE_BYTES)

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


def _reduce(places: list[torch.Tensor], out: torch.Tensor, op: ReduceOp) -> None:
    first, second, *others = places
    reduction = _REDUCTIONS[op]
    reduction(first, second, out=out)
    for other in others:
        reduction(out, other, out=out)


class _peer_errors:  # noqa: N801
    """Like `base.peer_errors` for a socket; a class, because a generator costs more than the call inside."""

    def __init__(self, rank: int) -> None:
        self._rank = rank

    def __enter__(self) -> None:
        return

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _: object) -> None:
        if isinstance(error, OSError):
            raise CollectiveError(f"the connection to rank {self._rank} failed: {error}") from error


def shared_bytes(num_ranks: int) -> int:
    """Returns the bytes that so many ranks share: two places for each."""
    return 2 * num_ranks * (_HEAD_BYTES + _PIECE_BYTES)


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
        client.add("sharing/able", int(made is not None))
        client.meet("sharing/open", timeout)
        if client.get("sharing/able") == str(member.size).encode():
            kept.pop_all()
            return made
    if member.rank == 0:
        _logger.warning("the ranks of %s cannot share memory; they exchange through the network", member.host)
    return None


def _meet(
    client: RendezvousClient, member: Member, stack: ExitStack, timeout: float
) -> tuple[socket.socket | None, bytes]:
    """Returns rank 0's door, or a link to it from another rank; and a token that only the ranks know.

    Returns None for the socket if there is none: containers may share an address but not a network namespace.
    """
    if member.rank == 0:
        door, token = open_door(stack), secrets.token_bytes(TOKEN_BYTES)
        client.set("sharing/door", token + door.getsockname() if door else b"")
        return door, token
    told = client.get("sharing/door", timeout) or b""
    token, name = told[:TOKEN_BYTES], told[TOKEN_BYTES:]
    return connect_to_door(name, token, member.rank, stack, timeout), token


def connect_to_door(
    name: bytes, token: bytes, rank: int, stack: ExitStack, timeout: float
) -> socket.socket | None:
    """Returns a connection to rank 0's door that has shown the token; None if there is no door or no way."""
    if name:
        with suppress(OSError):
            link = stack.enter_context(socket.socket(socket.AF_UNIX))
            link.settimeout(timeout)
            link.connect(name)
            if _leads_to_own_user(link):
                link.send(token + bytes([rank]))
                return link
    return None


def open_door(stack: ExitStack) -> socket.socket | None:
    """Returns a listening socket without a file, so a killed rank leaves nothing. None if that fails."""
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
    """Returns whether the process at the other end has the same user as this process."""
    _, user, _ = struct.unpack("iII", link.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12))
    return bool(user == os.geteuid())


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
    """Sends each rank its descriptors. Runs on rank 0 once all ranks have connected.

    Raises:
        OSError: A rank did not connect.
    """
    absent = set(descriptors)
    while absent:
        link, _address = door.accept()
        # A rank whose link fails stays absent; a stranger of this user, who knows no token, is disconnected.
        with link, suppress(OSError):
            if not _leads_to_own_user(link):
                continue
            link.setblocking(False)
            told = link.recv(len(token) + 1)
            if hmac.compare_digest(told[:-1], token):
                socket.send_fds(link, [b"1"], descriptors[told[-1]])
                absent.remove(told[-1])


def receive_descriptors(link: socket.socket, count: int) -> list[int]:
    """Returns the descriptors that rank 0 sends.

    Raises:
        OSError: Rank 0 sent another number of descriptors.
    """
    _, descriptors, _, _ = socket.recv_fds(link, 1, count)
    if len(descriptors) != count:
        for descriptor in descriptors:
            os.close(descriptor)
        raise OSError(f"rank 0 sent {len(descriptors)} of {count} descriptors")
    for descriptor in descriptors:
        # A program that the user's code starts must not hold the memory or the connections.
        os.set_inheritable(descriptor, False)
    return descriptors


def _receive(link: socket.socket, member: Member, meeting: ExitStack, kept: ExitStack) -> Dealt:
    """Returns this rank's part of what rank 0 deals; `meeting` and `kept` as for rank 0."""
    memory, *ends = receive_descriptors(link, member.size)
    meeting.callback(os.close, memory)
    others = [other for other in range(member.size) if other != member.rank]
    peers = {
        other: kept.enter_context(socket.socket(fileno=end)) for other, end in zip(others, ends, strict=True)
    }
    return memory, peers
