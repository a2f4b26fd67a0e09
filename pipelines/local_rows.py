"""Reads columns of a pandas DataFrame without Spark, to the arrays that a network got in the training."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from difflib import get_close_matches
from typing import Any

import numpy as np
import pyarrow as pa

from ringspark.pipelines.columns import MASK
from ringspark.pipelines.kinds import Array, Kind, Scalar, TableRow
from ringspark.pipelines.kinds.base import is_list
from ringspark.pipelines.kinds.scalar import TEMPORAL
from ringspark.pipelines.kinds.values import to_numbers
from ringspark.pipelines.nulls import fill_nulls, hide_nan, null_rows
from ringspark.pipelines.rows import NumpyArray

MISSING = "has a missing value"


@dataclass(frozen=True, kw_only=True)
class LocalInput:
    """One input of a network.

    Attributes:
        name: The column that it is made from.
        kind: Type of the column; None if it is not known. Inputs of one column share the object.
        part: Suffix of the array in a batch.
        source: Spark type of the training column; "" if unknown.
        fills_nulls: Whether the model was trained on missing values of the column.
        zone: Time zone of times without an offset.
    """

    name: str
    kind: Kind | None
    part: str = ""
    source: str = ""
    fills_nulls: bool = False
    zone: str = "UTC"


@dataclass(frozen=True)
class Reading:
    """The arrays that one column gives.

    Attributes:
        arrays: Arrays by the suffix of their name in a batch.
        masked: Whether each row is missing or holds a missing value, (rows,) bool.
        problems: Row -> why it gets no prediction, as a clause that follows "column 'x'".
    """

    arrays: dict[str, NumpyArray]
    masked: NumpyArray
    problems: dict[int, str]


def read_frame(
    inputs: Sequence[LocalInput], frame: Any
) -> tuple[list[NumpyArray], dict[int, tuple[str, str]]]:
    """Returns the network's inputs, fp32 or int64, and the column and problem of each unreadable row."""
    arrays, problems = [], dict[int, tuple[str, str]]()
    readings: dict[tuple[str, int], Reading] = {}
    for item in inputs:
        key = item.name, id(item.kind)
        if key not in readings:
            is_table = isinstance(item.kind, TableRow)
            names = item.kind.sources if isinstance(item.kind, TableRow) else [item.name]
            columns = {name: frame[find_column(frame, name)] for name in names}
            readings[key] = read_column(item, columns if is_table else columns[item.name])
        reading = readings[key]
        if item.part != MASK:
            problems |= {row: (item.name, why) for row, why in reading.problems.items()}
        made = reading.masked if item.part == MASK else reading.arrays[item.part]
        with np.errstate(over="ignore"):
            arrays.append(np.require(made, np.float32 if made.dtype.kind in "fb" else np.int64, ["C", "W"]))
    return arrays, problems


def read_column(item: LocalInput, values: Any) -> Reading:
    """Reads a pandas column; for the type "table_row", the table's columns by name."""
    try:
        kind = _find_kind(item, values)
        column, problems = kind.read(kind.read_values(values, item.source, item.zone))
    except ValueError as error:
        name = "" if isinstance(item.kind, TableRow) else f"{item.name!r} "
        raise ValueError(f"column {name}{error}") from None
    column, valid = hide_nan(column), None
    masked = null_rows(column)
    if masked is None:
        masked = np.zeros(len(column), bool)
    else:
        masked[list(problems)] = False
        valid = column.is_valid().to_numpy(zero_copy_only=False)
        column = fill_nulls(column)
    if not item.fills_nulls:
        problems |= dict.fromkeys(np.flatnonzero(masked).tolist(), MISSING)
    return Reading(kind.make_arrays(item.name, column, valid), masked, problems)


def _find_kind(item: LocalInput, values: Any) -> Kind:
    """Returns the type, which holds whole numbers of any size; from the values if it is not known."""
    if isinstance(item.kind, Scalar | Array) and item.source not in TEMPORAL and item.kind.dtype[:3] == "int":
        return replace(item.kind, dtype="int64")
    if item.kind is not None:
        return item.kind
    array = hide_nan(to_numbers(values, "", depth=None)).drop_null()
    leaf = array.type
    while is_list(leaf):
        leaf = leaf.value_type
    dtype = "int64" if pa.types.is_integer(leaf) else "float32"
    if leaf == array.type:
        return Scalar(dtype)
    low, high = Array(dtype).encode(fill_nulls(array)).shapes or ((), ())
    if low != high:
        raise ValueError(f"has arrays of shape {low} to {high}; give every row an array of the same shape")
    return Array(dtype, high)


def find_column(frame: Any, name: str) -> Any:
    """Returns the frame's name of a column.

    Like Spark, ignores case. If two names differ only by case, the name must match exactly.
    """
    if name in frame.columns:
        return name
    names = [str(column) for column in frame.columns]
    alike = [column for column in frame.columns if str(column).lower() == name.lower()]
    if len(alike) == 1:
        return alike[0]
    near = get_close_matches(name, names, 1)
    hint = f"; did you mean {near[0]!r}?" if near else f"; the request has {names}"
    raise ValueError(f"the model needs the column {name!r}, and the request lacks it{hint}")
