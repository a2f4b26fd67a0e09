"""Builds batches from shuffle streams: arranges the rows of many steps (a block) at once.

A block takes its rows from the streams in a short repeating cycle of streams (see `shuffle`). All rows of a
block at the same place of the cycle form a line. The rows are gathered line by line from their row groups;
transposing the lines gives the block.
"""

from __future__ import annotations

import threading
import weakref
from collections import defaultdict, deque
from collections.abc import Mapping, Sequence
from math import prod
from typing import NamedTuple, cast

import numpy as np
import numpy.typing as npt

from ringspark.pipelines.kinds import Kind, Scalar
from ringspark.pipelines.rows import NumpyArray, RaggedRows, Rows, join, take

RowGroup = dict[str, Rows]

PACKED_COLUMNS = 32
"""Smallest number of scalar columns of one dtype that are shuffled as one matrix.

Every operation on a piece of a column has a fixed cost.
"""

Packs = dict[str, list[str]]
"""Name of each matrix and of its columns; only the name of a matrix has a NUL."""

_SLACK_BYTES = 1 << 20  # the blocks of an epoch differ by a few rows
_KEPT_BYTES = 128 << 20
_KEPT_ARRAYS = 256  # a stream may hold two row groups, and a block uses every stream


class StreamRows(NamedTuple):
    """Rows of a row group that belong to one stream.

    `columns` hold the whole row group, and `rows` are the indexes into the row group.
    """

    columns: RowGroup
    rows: npt.NDArray[np.int64]


# Some of these rows.
_Part = tuple[StreamRows, slice]


def plan_packs(kinds: Mapping[str, Kind]) -> Packs:
    """Returns the columns to pack, by dtype; none in a table of few columns."""
    packs: defaultdict[str, list[str]] = defaultdict(list)
    for name, kind in kinds.items():
        if isinstance(kind, Scalar):
            packs[f"\0{kind.dtype}"].append(name)
    return {key: names for key, names in packs.items() if len(names) >= PACKED_COLUMNS}


def pack(columns: RowGroup, packs: Packs) -> RowGroup:
    """Replaces the columns of each pack by one matrix: (rows, columns)."""
    if not packs:
        return columns
    rest = dict(columns)
    matrices = {key: np.stack([rest.pop(name) for name in names], axis=1) for key, names in packs.items()}  # type: ignore[misc]
    return rest | matrices


def unpack(columns: RowGroup, packs: Packs) -> RowGroup:
    """Undoes `pack`; each column is contiguous."""
    if not packs:
        return columns
    rest = dict(columns)
    for key, names in packs.items():
        matrix = np.ascontiguousarray(cast(NumpyArray, rest.pop(key)).T)
        rest |= dict(zip(names, matrix, strict=True))
    return rest


class Buffers:
    """Memory that is reused once no array or view of it exists any more.

    The kernel takes longer to provide a new page than to copy rows into it.
    """

    def __init__(self) -> None:
        self._kept: dict[str, list[tuple[memoryview, weakref.ref[NumpyArray]]]] = {}
        self._lock = threading.Lock()

    @property
    def num_bytes(self) -> int:
        return sum(memory.nbytes for kept in self._kept.values() for memory, _ in kept)

    def empty(self, use: str, rows: int, like: NumpyArray) -> NumpyArray:
        """Returns an uninitialized array for `rows` rows with the row shape and dtype of `like`."""
        shape = (rows, *like.shape[1:])
        size = prod(shape) * like.dtype.itemsize
        if not size:
            return np.empty(shape, like.dtype)
        with self._lock:  # two epochs may be read at once
            kept = self._kept.setdefault(use, [])
            unused = next((number for number, (_, array) in enumerate(kept) if array() is None), None)
            memory = None if unused is None else kept.pop(unused)[0]
            if memory is None or memory.nbytes < size:
                memory = np.empty(size + min(size // 8, _SLACK_BYTES), np.uint8).data
            array = np.frombuffer(memory, like.dtype, prod(shape))
            # A view of a view refers to the first array whose memory does not belong to an array. That is
            # this array, so it lives as long as any view of it, including tensors and buffers.
            assert not isinstance(array.base, np.ndarray)
            kept.append((memory, weakref.ref(array)))
            del kept[:-_KEPT_ARRAYS]
        return array.reshape(shape)

    def trim(self) -> None:
        """Releases the memory if it is large: large epochs take so long that new memory costs little."""
        with self._lock:
            if self.num_bytes > _KEPT_BYTES:
                self._kept.clear()


class StreamBuffer:
    def __init__(self) -> None:
        self._pieces: deque[tuple[int, StreamRows]] = deque()  # first local row, the rows from there on
        self._next: int | None = None

    def add(self, start: int, piece: StreamRows) -> None:
        """Adds `piece`, whose first row is local row `start` (see `Deal`). Pieces may come in any order."""
        self._pieces.append((start, piece))
        if len(self._pieces) > 1 and self._pieces[-2][0] > start:
            self._pieces = deque(sorted(self._pieces, key=lambda item: item[0]))

    def take(self, num_rows: int) -> list[_Part]:
        taken = []
        while num_rows:
            start, piece = self._pieces[0]
            self._next = start if self._next is None else self._next
            first = self._next - start
            assert 0 <= first < len(piece.rows), "a stream was read out of order"
            last = min(len(piece.rows), first + num_rows)
            taken.append((piece, slice(first, last, 1)))
            num_rows -= last - first
            self._next += last - first
            if last == len(piece.rows):
                self._pieces.popleft()
        return taken


def assemble(
    streams: Sequence[StreamBuffer],
    stream_cycle: npt.NDArray[np.int64],
    start: int,
    stop: int,
    empty: RowGroup,
    buffers: Buffers,
) -> RowGroup:
    """Takes rows `start` to `stop` of the shard's epoch from the streams, in the order of the batches.

    Row i is the next row of stream `stream_cycle[i % len(stream_cycle)]`. `empty` is a block of 0 rows.
    """
    num_rows, step = stop - start, len(stream_cycle)
    if not num_rows:
        return empty
    lines: list[list[_Part]] = [[] for _ in range(step)]
    for index, stream in enumerate(streams):
        places = _places(stream_cycle, index, start, num_rows)
        _deal(stream.take(sum(len(range(place, num_rows, step)) for place in places)), places, lines)
    block: RowGroup = {}
    for name, like in empty.items():
        if isinstance(like, RaggedRows):
            block[name] = _gather_ragged(name, lines, num_rows)
            continue
        table = buffers.empty(f"block of {name}", -(-num_rows // step) * step, like)
        _gather(name, lines, table, buffers)
        block[name] = table[:num_rows]
    return block


def _places(stream_cycle: npt.NDArray[np.int64], stream: int, start: int, num_rows: int) -> list[int]:
    turns = (np.flatnonzero(stream_cycle == stream) - start) % len(stream_cycle)
    return [place for place in sorted(turns.tolist()) if place < num_rows]


def _deal(parts: Sequence[_Part], places: Sequence[int], lines: list[list[_Part]]) -> None:
    done, turns = 0, len(places)
    for piece, rows in parts:
        for turn, place in enumerate(places):
            lines[place].append((piece, slice(rows.start + (turn - done) % turns, rows.stop, turns)))
        done += rows.stop - rows.start


def _gather(name: str, lines: Sequence[Sequence[_Part]], block: NumpyArray, buffers: Buffers) -> None:
    """Gathers a column into `block`, line by line (see the module)."""
    step, height = len(lines), len(block) // len(lines)
    table = block if step == 1 else buffers.empty(f"lines of {name}", len(block), block)
    for place, parts in enumerate(lines):
        done = place * height
        for piece, span in parts:
            rows, values = piece.rows[span], cast("NumpyArray", piece.columns[name])
            # With the default mode, NumPy buffers the rows first, so that an error leaves `out` unchanged.
            np.take(values, rows, axis=0, out=table[done : done + len(rows)], mode="clip")
            done += len(rows)
    if step > 1:
        block.reshape(height, step, -1)[:] = table.reshape(step, height, -1).swapaxes(0, 1)


def _gather_ragged(name: str, lines: Sequence[Sequence[_Part]], num_rows: int) -> Rows:
    rows = join([take(piece.columns[name], piece.rows[span]) for parts in lines for piece, span in parts])
    source = np.empty(num_rows, dtype=np.int64)
    places = [np.arange(place, num_rows, len(lines)) for place in range(min(len(lines), num_rows))]
    source[np.concatenate(places)] = np.arange(num_rows)
    return take(rows, source)
