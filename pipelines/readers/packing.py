"""Packs the scalar columns of a wide table into matrices, while their rows are shuffled.

Every operation on a piece of a column has a fixed cost, which dominates for 1,000 columns of numbers.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping
from typing import cast

import numpy as np

from ringspark.pipelines.kinds import Kind, Scalar
from ringspark.pipelines.readers.blocks import RowGroup
from ringspark.pipelines.rows import NumpyArray

_LEAST_COLUMNS = 32

Packs = dict[str, list[str]]
"""Name of a matrix and the names of its columns; the name of a matrix has a NUL, unlike a column's name."""


def plan_packs(kinds: Mapping[str, Kind]) -> Packs:
    """Returns the columns to pack, by dtype; none in a table of few columns."""
    packs: defaultdict[str, list[str]] = defaultdict(list)
    for name, kind in kinds.items():
        if isinstance(kind, Scalar):
            packs[f"\0{kind.dtype}"].append(name)
    return {key: names for key, names in packs.items() if len(names) >= _LEAST_COLUMNS}


def pack(columns: RowGroup, packs: Packs) -> RowGroup:
    """Replaces columns by matrices with a row per row."""
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
