"""Makes batches from lanes: puts the rows of many steps into the order of positions at once.

Positions take their rows from the lanes in a short repeating cycle (see
`lanes`), so the rows of a lane go to every n-th place of the block. That is a
plain strided copy, several times faster than a gather of single rows.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from typing import Any, cast

import numpy as np
import numpy.typing as npt

from ringspark.pipelines.rows import RaggedRows, Rows, cut, join, take

RowGroup = dict[str, Rows]

# Some rows of a piece: its columns, then the first row and the row after the last.
_Part = tuple[RowGroup, int, int]


class LaneBuffer:
    """The rows of one lane that are in memory and not yet used, in order."""

    def __init__(self) -> None:
        self._pieces: deque[tuple[int, int, RowGroup]] = deque()  # (first local row, stop, columns)
        self._next: int | None = None

    def add(self, start: int, stop: int, piece: RowGroup) -> None:
        """Takes local rows `start` to `stop`. A piece may arrive before those in front of it."""
        self._pieces.append((start, stop, piece))
        if len(self._pieces) > 1 and self._pieces[-2][0] > start:
            self._pieces = deque(sorted(self._pieces, key=lambda item: item[0]))

    def take(self, num_rows: int) -> list[_Part]:
        """Removes the next rows; returns the pieces that hold them, each with its range of rows."""
        taken = []
        while num_rows:
            start, stop, piece = self._pieces[0]
            self._next = start if self._next is None else self._next
            first = self._next
            assert start <= first < stop, "a lane was read out of order"
            last = min(stop, first + num_rows)
            taken.append((piece, first - start, last - start))
            num_rows -= last - first
            self._next = last
            if last == stop:
                self._pieces.popleft()
        return taken


def assemble(
    lanes: Sequence[LaneBuffer],
    lane_cycle: npt.NDArray[np.int64],
    start: int,
    stop: int,
    empty: RowGroup,
) -> RowGroup:
    """Takes the rows of the shard's positions `start` to `stop` from the lanes, in their order.

    Args:
        lanes: The shard's lanes, which hold the rows.
        lane_cycle: Position i takes the next row of lane `lane_cycle[i % len(lane_cycle)]`.
        start: First position; only the shard's positions are counted.
        stop: The position after the last one.
        empty: Every column with no rows.
    """
    num_rows = stop - start
    if not num_rows:
        return empty
    step = len(lane_cycle)
    parts, places = [], []
    for index, lane in enumerate(lanes):
        lane_places = _places(lane_cycle, index, start, num_rows)
        parts.append(lane.take(sum(len(range(first, num_rows, step)) for first in lane_places)))
        places.append(lane_places)
    copies = _copies(parts, places, step)
    block: RowGroup = {}
    for name, like in empty.items():
        if isinstance(like, RaggedRows):
            block[name] = _gather(name, parts, places, step, num_rows)
            continue
        rows = np.empty((num_rows, *like.shape[1:]), dtype=like.dtype)
        for piece, source, target in copies:
            rows[target] = cast("npt.NDArray[Any]", piece[name])[source]
        block[name] = rows
    return block


def _places(lane_cycle: npt.NDArray[np.int64], lane: int, start: int, num_rows: int) -> list[int]:
    """Returns the lane's first places in the block, one for each time the lane occurs in the cycle."""
    turns = (np.flatnonzero(lane_cycle == lane) - start) % len(lane_cycle)
    return [place for place in sorted(turns.tolist()) if place < num_rows]


def _copies(
    parts: Sequence[Sequence[_Part]], places: Sequence[Sequence[int]], step: int
) -> list[tuple[RowGroup, slice, slice]]:
    """Returns the copies to make for every dense column: (piece, rows of the piece, rows of the block)."""
    copies = []
    for lane_parts, lane_places in zip(parts, places, strict=True):
        done, turns = 0, len(lane_places)
        for piece, first, last in lane_parts:
            for turn, place in enumerate(lane_places):
                # Row t of the lane goes to turn t % turns, in round t // turns.
                skipped = (turn - done) % turns
                count = len(range(first + skipped, last, turns))
                begin = place + (done + skipped) // turns * step
                source = slice(first + skipped, last, turns)
                copies.append((piece, source, slice(begin, begin + count * step, step)))
            done += last - first
    return copies


def _gather(
    name: str,
    parts: Sequence[Sequence[_Part]],
    places: Sequence[Sequence[int]],
    step: int,
    num_rows: int,
) -> Rows:
    """Joins ragged rows of all lanes and takes them in the order of their places."""
    joined = join([cut(piece[name], *bounds) for lane_parts in parts for piece, *bounds in lane_parts])
    lane_rows = [
        np.sort(np.concatenate([np.arange(place, num_rows, step) for place in lane_places]))
        for lane_places in places
        if lane_places
    ]
    source = np.empty(num_rows, dtype=np.int64)
    source[np.concatenate(lane_rows)] = np.arange(num_rows)
    return take(joined, source)
