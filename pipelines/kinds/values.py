"""Converts values of pandas, JSON and Arrow to the Arrow arrays that `Kind.select` gives in Spark.

A pandas NaN counts as missing, because pandas has no other null. A message of a ValueError is a clause that
follows "column 'x'".
"""

from __future__ import annotations

import base64
import binascii
import datetime
from collections.abc import Sequence
from decimal import Decimal
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from ringspark.pipelines.kinds.base import is_list, number_type
from ringspark.pipelines.nulls import map_leaf, nan_to_null
from ringspark.pipelines.rows import NumpyArray

EXACT_DIGITS = 15
"""Different decimals of up to this many digits stay different as float64."""


def is_missing(value: Any) -> bool:
    # pandas' NA is no float and equals nothing, and NaT differs from itself.
    is_nan = isinstance(value, float | np.floating) and bool(value != value)
    return value is None or type(value).__name__ in ("NAType", "NaTType") or is_nan


def shorten(value: Any) -> str:
    text = repr(value.item() if isinstance(value, np.generic) else value)
    return text if len(text) <= 60 else f"{text[:57]}..."


def to_list(values: Any) -> list[Any]:
    """Returns Python values, with None for missing ones."""
    found = values.to_pylist() if isinstance(values, pa.Array) else list(values)
    return [None if is_missing(value) else value for value in found]


def to_arrow(values: Any) -> Any:
    """Returns an Arrow array of the type that the values show, with lists in place of NumPy arrays."""
    if not isinstance(values, pa.Array):
        dtype = getattr(values, "dtype", np.dtype("O"))
        if dtype.kind == "O":
            values = [_to_plain(value) for value in values]
        elif isinstance(dtype, np.dtype):
            values = np.asarray(values)  # Arrow takes it in a fraction of the time of a Series
        try:
            values = pa.array(values, from_pandas=True)
        except (pa.ArrowException, OverflowError) as error:
            raise ValueError(f"holds values of several types or sizes ({error})") from None
    if isinstance(values, pa.ChunkedArray):
        values = values.combine_chunks()
    if pa.types.is_dictionary(values.type):
        values = values.dictionary_decode()
    plain = _plain_type(values.type)
    return values if plain == values.type else values.cast(plain)


def _plain_type(data_type: Any) -> Any:
    """Returns the type with lists of any size in place of lists of one size, and plain texts and bytes."""
    if pa.types.is_fixed_size_list(data_type):
        return pa.list_(_plain_type(data_type.value_type))
    if pa.types.is_list(data_type) or pa.types.is_large_list(data_type):
        inner = _plain_type(data_type.value_type)
        return data_type if inner == data_type.value_type else pa.list_(inner)
    # pyarrow before 16 has no views.
    return {"string_view": pa.string(), "binary_view": pa.binary()}.get(str(data_type), data_type)


def _to_plain(value: Any) -> Any:
    if isinstance(value, Decimal):
        return float(value)  # Arrow may miss the nearest float64
    if hasattr(value, "toArray"):  # a vector of Spark
        value = value.toArray()
    return value.tolist() if isinstance(value, np.ndarray) and value.ndim > 1 else value


def to_numbers(values: Any, dtype: str, depth: int | None = 0) -> Any:
    """Returns numbers, or lists of them nested `depth` times, without rounding of whole numbers.

    None takes any depth, and an empty dtype any dtype.
    """
    array = to_arrow(values)
    leaf, found = array.type, 0
    while is_list(leaf):
        leaf, found = leaf.value_type, found + 1
    depth = found if depth is None else depth
    is_decimal = pa.types.is_decimal(leaf)
    is_number = is_decimal or pa.types.is_null(leaf) or pa.types.is_boolean(leaf)
    is_number |= pa.types.is_integer(leaf) or pa.types.is_floating(leaf)
    if not is_number or (found != depth and not (pa.types.is_null(leaf) and found < depth)):
        wanted = f"a list of {'lists of ' * (depth - 1)}numbers" if depth else "a number"
        raise ValueError(f"holds {shorten(array.drop_null()[0].as_py())}, which is not {wanted}")
    if is_decimal:
        array = map_leaf(array, decimals_to_doubles)
    if not dtype:
        return array
    if np.dtype(dtype).kind in "biu":
        array = map_leaf(array, nan_to_null)
    wanted_type = number_type(dtype)
    for _ in range(depth):
        wanted_type = pa.list_(wanted_type)
    try:
        made = array.cast(wanted_type, safe=np.dtype(dtype).kind != "f")
        if dtype == "bool" and not pa.types.is_null(leaf) and not made.cast(array.type).equals(array):
            raise pa.ArrowInvalid("it is neither 0 nor 1")
    except pa.ArrowInvalid as error:
        raise ValueError(
            f"held {dtype} numbers in the training, but a value cannot be cast: {error}; "
            "give whole numbers in the range of that type"
        ) from None
    return made


def decimals_to_doubles(decimals: Any) -> Any:
    """Converts decimals to the nearest float64, which Arrow's own cast may miss."""
    if decimals.type.precision > EXACT_DIGITS:
        return pa.array(
            [None if value is None else float(value) for value in decimals.to_pylist()], pa.float64()
        )
    decimals = decimals.cast(pa.decimal128(decimals.type.precision, decimals.type.scale))
    words = np.frombuffer(decimals.buffers()[1], "<i8").reshape(-1, 2)
    # 15 digits fit into the lower word, and both numbers are exact, so the quotient is rounded only once.
    unscaled = words[decimals.offset : decimals.offset + len(decimals), 0]
    numbers = unscaled.astype(np.float64) / 10.0**decimals.type.scale
    return pa.array(numbers, mask=decimals.is_null().to_numpy(zero_copy_only=False))


def to_texts(values: Any) -> Any:
    array = to_arrow(values)
    types = pa.types
    if not (types.is_string(array.type) or types.is_large_string(array.type) or types.is_null(array.type)):
        first = shorten(array.drop_null()[0].as_py())
        raise ValueError(f"holds {first}, but the model was trained on strings")
    return array.cast(pa.string())


def to_bytes(value: Any) -> bytes:
    """Returns bytes; a string is base64, as in JSON."""
    if isinstance(value, str):
        try:
            return base64.b64decode(value, validate=True)
        except (binascii.Error, ValueError):
            raise ValueError(f"holds {shorten(value)}, which is not base64") from None
    if isinstance(value, bytes | bytearray | memoryview):
        return bytes(value)
    raise ValueError(f"holds {shorten(value)}, which is neither bytes nor base64")


def to_times(values: Any, source: str, zone: str) -> Any:
    """Returns days, or microseconds since 1970, as Arrow's type of the Spark type `source`.

    A timestamp without an offset is in `zone`.
    """
    wanted = {"date": pa.date32(), "timestamp": pa.timestamp("us", "UTC")}.get(source, pa.timestamp("us"))
    given = getattr(values, "type", None)
    offset = getattr(given, "tz", "")  # None without a time zone, "" for other types
    is_utc = source == "timestamp" and (offset or (offset is None and zone == "UTC"))
    if given == wanted or is_utc or (source == "timestamp_ntz" and offset is None):
        return values
    micros, missing = microseconds(to_list(values), zone if source == "timestamp" else "")
    days = (micros // 86_400_000_000).astype(np.int32)
    return pa.array(days if source == "date" else micros, mask=missing).view(wanted)


def microseconds(values: Sequence[Any], zone: str) -> tuple[NumpyArray, NumpyArray]:
    """Returns int64 microseconds since 1970 UTC, and a mask of missing values.

    A time without an offset is in `zone`. If `zone` is "", offsets are ignored: all times count as UTC.
    """
    import pandas as pd

    found = np.zeros(len(values), np.int64)
    for row, value in enumerate(values):
        if value is None:
            continue
        try:
            if not isinstance(value, str | datetime.date | np.datetime64):
                raise ValueError
            moment = pd.Timestamp(value)
        except ValueError:
            raise ValueError(f"holds {shorten(value)}, which is not a date or time") from None
        if not zone:
            moment = moment.replace(tzinfo=None)
        elif moment.tzinfo is None:
            # Like Spark: an ambiguous time is the earlier one, and a skipped time moves one hour forward.
            moment = moment.tz_localize(zone, ambiguous=True, nonexistent=pd.Timedelta("1h"))
        found[row] = moment.to_datetime64().astype("datetime64[us]").astype(np.int64)
    return found, np.array([value is None for value in values], bool)


def at_path(values: Any, path: Sequence[str]) -> Any:
    """Returns a nested field of each struct; null if a struct is missing."""
    for part in path:
        given = getattr(values, "type", pa.null())
        if pa.types.is_struct(given) and given.get_field_index(part) >= 0:
            values = pc.struct_field(values, part)
        else:
            values = [None if value is None else _field_of(value, part) for value in to_list(values)]
    return values


def _field_of(value: Any, part: str) -> Any:
    struct = value.asDict() if hasattr(value, "asDict") else value
    if not isinstance(struct, dict):
        raise ValueError(f"holds {shorten(value)}, but it must be a dict with the key {part!r}")
    if part not in struct:
        raise ValueError(f"lacks the key {part!r} in {shorten(value)}")
    return struct[part]
