"""Builds batches from shuffle streams: arranges the rows of many steps (a block) at once.

A block takes its rows from the streams in a short repeating cycle of streams (see `shuffle`). All rows of a
block at the same place of the cycle form a line. The rows are gathered from their row groups line by line,
and then put into the order of the block.
"""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Mapping, Sequence
from typing import NamedTuple, cast

import numpy as np
import numpy.typing as npt

from ringspark.pipelines.kinds import Kind, Scalar
from ringspark.pipelines.rows import NumpyArray, Rows, join, take

RowGroup = dict[str, Rows]

PACKED_COLUMNS = 32
"""Smallest number of scalar columns of one dtype that are shuffled as one matrix.

Every operation on a piece of a column has a fixed cost.
"""

Packs = dict[str, list[str]]
"""Name of each matrix and of its columns; only the name of a matrix has a NUL."""


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
    source = np.empty(num_rows, dtype=np.int64)
    places_of_lines = [np.arange(place, num_rows, step) for place in range(min(step, num_rows))]
    source[np.concatenate(places_of_lines)] = np.arange(num_rows)
    block: RowGroup = {}
    for name in empty:
        rows = join([take(piece.columns[name], piece.rows[span]) for parts in lines for piece, span in parts])
        block[name] = take(rows, source) if step > 1 else rows
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
