"""Finds and fills the nulls in Arrow data that Spark hands over.

A row counts as null if its value is null or if any element inside its lists is.
The parts of an ML vector's struct are null by design and do not count.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from ringspark.pipelines.kinds.base import is_list


def null_rows(values: Any) -> npt.NDArray[np.bool_] | None:
    """Returns, for each row of an Arrow array, whether it is null or holds a null; None if none does."""
    found: npt.NDArray[np.bool_] | None = None
    if values.null_count:
        found = values.is_null().to_numpy(zero_copy_only=False)
    if not is_list(values.type):
        return found
    # flatten() leaves the elements of null rows out; their lists count as empty.
    inside = null_rows(values.flatten())
    if inside is None:
        return found
    lengths = pc.fill_null(pc.list_value_length(values), 0).to_numpy(zero_copy_only=False)
    ends = np.cumsum(lengths)
    counts = np.concatenate([[0], np.cumsum(inside)])
    holds: npt.NDArray[np.bool_] = counts[ends] > counts[ends - lengths]
    return holds if found is None else found | holds


def fill_nulls(values: Any) -> Any:
    """Returns an Arrow array of the same type with zeros, empty strings or empty lists in place of nulls."""
    if is_list(values.type):
        leaf = values.flatten()
        lengths = pc.fill_null(pc.list_value_length(values), 0).to_numpy(zero_copy_only=False)
        offsets = np.concatenate([[0], np.cumsum(lengths)]).astype(np.int32)
        return pa.ListArray.from_arrays(pa.array(offsets), fill_nulls(leaf))
    if not values.null_count:
        return values
    if pa.types.is_struct(values.type):
        # The only structs that get here are sparse vectors: an empty vector takes the place of a null.
        return _fill_vectors(values)
    zero: Any = 0
    if pa.types.is_boolean(values.type):
        zero = False
    elif pa.types.is_string(values.type) or pa.types.is_large_string(values.type):
        zero = ""
    elif pa.types.is_binary(values.type) or pa.types.is_large_binary(values.type):
        zero = b""
    elif pa.types.is_fixed_size_binary(values.type):
        zero = bytes(values.type.byte_width)
    elif pa.types.is_temporal(values.type):
        number = pa.int32() if pa.types.is_date32(values.type) else pa.int64()
        return pc.fill_null(values.view(number), 0).view(values.type)
    return pc.fill_null(values, pa.scalar(zero, values.type))


def _fill_vectors(values: Any) -> Any:
    # flatten() makes the parts of a null struct null, so they are filled like any other null.
    parts = [fill_nulls(part) for part in values.flatten()]
    return pa.StructArray.from_arrays(parts, fields=list(values.type))
