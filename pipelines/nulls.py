"""Finds and fills nulls in Arrow data from Spark."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from ringspark.pipelines.kinds.base import is_list


def null_rows(values: Any) -> npt.NDArray[np.bool_] | None:
    """Returns booleans that are True for rows that are null or hold a null; None if there is no such row."""
    found: npt.NDArray[np.bool_] | None = None
    if values.null_count:
        found = values.is_null().to_numpy(zero_copy_only=False)
    if not is_list(values.type):
        return found
    inside = null_rows(values.flatten())
    if inside is None:
        return found
    counts = np.concatenate([[0], np.cumsum(inside)])[_offsets(values)]
    holds: npt.NDArray[np.bool_] = counts[1:] > counts[:-1]
    return holds if found is None else found | holds


def fill_nulls(values: Any) -> Any:
    """Replaces nulls by zeros, empty strings or empty lists; the type stays the same."""
    if is_list(values.type):
        return pa.ListArray.from_arrays(pa.array(_offsets(values), pa.int32()), fill_nulls(values.flatten()))
    if not values.null_count:
        return values
    if pa.types.is_struct(values.type):
        # Only sparse vectors are structs here, and null becomes an empty vector. flatten() makes the parts of
        # a null struct null, so they are filled too.
        return pa.StructArray.from_arrays(map(fill_nulls, values.flatten()), names=_names(values))
    zero: Any = 0
    if pa.types.is_boolean(values.type):
        zero = False
    elif pa.types.is_string(values.type) or pa.types.is_large_string(values.type):
        zero = ""
    elif pa.types.is_binary(values.type) or pa.types.is_large_binary(values.type):
        zero = b""
    elif pa.types.is_fixed_size_binary(values.type):
        zero = bytes(values.type.byte_width)
    return pc.fill_null(values, pa.scalar(zero, values.type))


def map_leaf(values: Any, change: Callable[[Any], Any]) -> Any:
    """Changes the numbers of an Arrow array, or of all (nested) lists in it."""
    if not is_list(values.type):
        return change(values)
    leaf = values.flatten()
    changed = map_leaf(leaf, change)
    if changed is leaf:
        return values
    mask = values.is_null() if values.null_count else None
    return pa.ListArray.from_arrays(pa.array(_offsets(values), pa.int32()), changed, mask=mask)


def hide_nan(values: Any) -> Any:
    """Makes each NaN null, also in lists; a vector that holds one becomes null."""
    if not pa.types.is_struct(values.type):
        return map_leaf(values, nan_to_null)
    parts = dict(zip(_names(values), values.flatten(), strict=True))
    if "values" in parts:  # not the row of a table
        parts["values"] = hide_nan(parts["values"])
        if (found := null_rows(parts["values"])) is not None:
            return pa.StructArray.from_arrays(list(parts.values()), names=list(parts), mask=pa.array(found))
    return values


def nan_to_null(leaf: Any) -> Any:
    if not pa.types.is_floating(leaf.type) or not pc.any(pc.is_nan(leaf)).as_py():
        return leaf
    return pc.if_else(pc.is_nan(leaf), pa.scalar(None, leaf.type), leaf)


def _offsets(values: Any) -> npt.NDArray[np.int64]:
    """Returns the bounds of each list in `flatten()`, which leaves out the elements of null rows."""
    lengths = pc.fill_null(pc.list_value_length(values), 0).to_numpy(zero_copy_only=False)
    return np.concatenate([[0], np.cumsum(lengths, dtype=np.int64)])


def _names(values: Any) -> list[str]:
    # Not the fields, because the lists of a copy may have another nullability.
    return [field.name for field in values.type]
