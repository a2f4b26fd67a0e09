"""Rows of one column in a reader's memory.

Rows of equal length are one NumPy array. Rows of varying length (lists, sparse vectors, files) are
concatenated values with offsets.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, cast

import numpy as np
import numpy.typing as npt

NumpyArray = npt.NDArray[Any]


@dataclass(frozen=True)
class RaggedRows:
    """Rows of varying length.

    Attributes:
        offsets: Int64, (rows + 1,): row i has the values `part[offsets[i]:offsets[i + 1]]` of every part. The
            first offset may be above 0, because a slice of rows is a view.
        parts: Arrays of values.
    """

    offsets: npt.NDArray[np.int64]
    parts: tuple[NumpyArray, ...]

    def compact(self) -> RaggedRows:
        """Returns the same rows with offsets from 0, and without values that belong to no row."""
        first, last = int(self.offsets[0]), int(self.offsets[-1])
        return RaggedRows(self.offsets - first, tuple(part[first:last] for part in self.parts))


Rows = NumpyArray | RaggedRows


def num_rows(rows: Rows) -> int:
    return len(rows.offsets) - 1 if isinstance(rows, RaggedRows) else len(rows)


def take(rows: Rows, indexes: npt.NDArray[np.int64]) -> Rows:
    if not isinstance(rows, RaggedRows):
        taken: NumpyArray = rows.take(indexes, axis=0)
        return taken
    starts = rows.offsets[indexes]
    lengths = rows.offsets[indexes + 1] - starts
    offsets = np.zeros(len(indexes) + 1, dtype=np.int64)
    np.cumsum(lengths, out=offsets[1:])
    # Value j comes from its row's old start plus j's distance from the row's new start.
    values = np.repeat(starts - offsets[:-1], lengths) + np.arange(offsets[-1])
    return RaggedRows(offsets, tuple(part.take(values) for part in rows.parts))


def cut(rows: Rows, start: int, stop: int) -> Rows:
    if isinstance(rows, RaggedRows):
        return RaggedRows(rows.offsets[start : stop + 1], rows.parts)
    return rows[start:stop]


def join(pieces: Sequence[Rows]) -> Rows:
    if len(pieces) == 1:
        return pieces[0]
    if not isinstance(pieces[0], RaggedRows):
        joined: NumpyArray = np.concatenate(cast("Sequence[NumpyArray]", pieces))
        return joined
    ragged = [piece.compact() for piece in pieces if isinstance(piece, RaggedRows)]
    lengths = np.concatenate([np.diff(piece.offsets) for piece in ragged])
    offsets = np.zeros(len(lengths) + 1, dtype=np.int64)
    np.cumsum(lengths, out=offsets[1:])
    parts = zip(*(piece.parts for piece in ragged), strict=True)
    return RaggedRows(offsets, tuple(np.concatenate(part) for part in parts))


def num_bytes(rows: Rows) -> int:
    if isinstance(rows, RaggedRows):
        values = int(rows.offsets[-1] - rows.offsets[0])
        return rows.offsets.nbytes + values * sum(part.itemsize for part in rows.parts)
    return rows.nbytes
