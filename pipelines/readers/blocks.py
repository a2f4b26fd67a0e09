"""Makes batches from lanes: puts the rows of many steps into the order of positions at once.

Positions take their rows from the lanes in a short repeating cycle (see `lanes`). So the rows of each place
of the cycle are gathered, from where they were decoded, into a line of their own, and the block is the
transpose of these lines. Rows are copied twice, within the processor's cache, and never in between.
"""

from __future__ import annotations

import sys
from collections import deque
from collections.abc import Sequence
from math import prod
from typing import Any, cast

import numpy as np
import numpy.typing as npt

from ringspark.pipelines.rows import NumpyArray, RaggedRows, Rows, join, take

RowGroup = dict[str, Rows]

# Columns, and the indexes of some of their rows in the order of a lane.
_Part = tuple[RowGroup, npt.NDArray[np.int64]]

_MOST_KEPT = 6  # blocks: those that were read ahead, the one in use, and the one being made
_SLACK_ROWS = 256  # The blocks of an epoch differ by a few rows.


class LaneBuffer:
    """The rows of one lane that are in memory and not yet used, in order."""

    def __init__(self) -> None:
        self._pieces: deque[tuple[int, _Part]] = deque()  # first local row, the rows from there on
        self._next: int | None = None

    def add(self, start: int, columns: RowGroup, rows: npt.NDArray[np.int64]) -> None:
        """Takes `rows` of the columns as local rows from `start`. They may come before earlier ones."""
        self._pieces.append((start, (columns, rows)))
        if len(self._pieces) > 1 and self._pieces[-2][0] > start:
            self._pieces = deque(sorted(self._pieces, key=lambda piece: piece[0]))

    def take(self, num_rows: int) -> list[_Part]:
        """Removes the next rows and returns them."""
        taken = []
        while num_rows:
            start, (columns, rows) = self._pieces[0]
            self._next = start if self._next is None else self._next
            first = self._next - start
            assert 0 <= first < len(rows), "a lane was read out of order"
            part = rows[first : first + num_rows]
            taken.append((columns, part))
            num_rows -= len(part)
            self._next += len(part)
            if first + len(part) == len(rows):
                self._pieces.popleft()
        return taken


class Buffers:
    """Arrays that are used again once nobody else refers to them or to a view of them.

    The kernel takes longer to hand out a fresh page than a row takes to be copied into it.
    """

    def __init__(self) -> None:
        self._kept: dict[str, list[NumpyArray]] = {}

    def empty(self, name: str, rows: int, like: NumpyArray) -> NumpyArray:
        """Returns an array of `rows` rows of any content, whose shape and dtype are those of `like`."""
        kept = self._kept.setdefault(name, [])
        for number, array in enumerate(kept):
            # Referred to by the list, by this loop and by the call.
            if sys.getrefcount(array) == 3:
                if len(array) >= rows:
                    return array[:rows]
                del kept[number]
                break
        made = np.empty((rows + _SLACK_ROWS, *like.shape[1:]), dtype=like.dtype)
        if len(kept) < _MOST_KEPT:
            kept.append(made)
        return made[:rows]


def assemble(
    lanes: Sequence[LaneBuffer],
    lane_cycle: npt.NDArray[np.int64],
    start: int,
    stop: int,
    empty: RowGroup,
    buffers: Buffers,
) -> RowGroup:
    """Takes the rows of the shard's positions `start` to `stop` from the lanes, in their order.

    Args:
        lanes: The shard's lanes, which hold the rows.
        lane_cycle: Position i takes the next row of lane `lane_cycle[i % len(lane_cycle)]`.
        start: First position; only the shard's positions are counted.
        stop: The position after the last one.
        empty: Every column with no rows.
        buffers: Where the block's arrays come from.
    """
    num_rows, step = stop - start, len(lane_cycle)
    if not num_rows:
        return empty
    lines: list[list[_Part]] = [[] for _ in range(step)]
    for index, lane in enumerate(lanes):
        places = _places(lane_cycle, index, start, num_rows)
        for place, parts in _dealt(lane.take(sum(len(range(at, num_rows, step)) for at in places)), places):
            lines[place].append(parts)
    block: RowGroup = {}
    for name, like in empty.items():
        if isinstance(like, RaggedRows):
            block[name] = _gather_ragged(name, lines, num_rows)
        else:
            block[name] = _gather(name, lines, num_rows, like, buffers)
    return block


def _places(lane_cycle: npt.NDArray[np.int64], lane: int, start: int, num_rows: int) -> list[int]:
    """Returns the lane's first places in the block, one for each time the lane occurs in the cycle."""
    turns = (np.flatnonzero(lane_cycle == lane) - start) % len(lane_cycle)
    return [place for place in sorted(turns.tolist()) if place < num_rows]


def _dealt(parts: Sequence[_Part], places: Sequence[int]) -> list[tuple[int, _Part]]:
    """Deals the rows of a lane to its places in the cycle, in turns; returns (place, rows) in order."""
    if len(places) == 1:
        return [(places[0], part) for part in parts]
    dealt, done = [], 0
    for columns, rows in parts:
        for turn, place in enumerate(places):
            dealt.append((place, (columns, rows[(turn - done) % len(places) :: len(places)])))
        done += len(rows)
    return dealt


def _gather(
    name: str, lines: Sequence[Sequence[_Part]], num_rows: int, like: NumpyArray, buffers: Buffers
) -> NumpyArray:
    """Returns the block of a dense column: place p of the cycle takes the rows of line p in turn."""
    step, height = len(lines), -(-num_rows // len(lines))
    block = buffers.empty(name, step * height, like)
    # With one line, the block is that line.
    table = block if step == 1 else buffers.empty(f"{name} in lines", step * height, like)
    for place, parts in enumerate(lines):
        done = place * height
        for columns, rows in parts:
            values = cast("npt.NDArray[Any]", columns[name])
            # Without a mode, NumPy would copy `out` to be able to give it back unchanged.
            np.take(values, rows, axis=0, out=table[done : done + len(rows)], mode="clip")
            done += len(rows)
    if step > 1:
        width = prod(like.shape[1:])
        block.reshape(height, step, width)[:] = table.reshape(step, height, width).swapaxes(0, 1)
    return block[:num_rows]


def _gather_ragged(name: str, lines: Sequence[Sequence[_Part]], num_rows: int) -> Rows:
    """Joins the ragged rows of all lines and takes them in the order of their positions."""
    joined = join([take(columns[name], rows) for parts in lines for columns, rows in parts])
    source = np.empty(num_rows, dtype=np.int64)
    filled = [np.arange(place, num_rows, len(lines)) for place in range(min(len(lines), num_rows))]
    source[np.concatenate(filled)] = np.arange(num_rows)
    return take(joined, source)
