"""Converts the values of a pandas column to NumPy arrays, and marks missing values."""

from __future__ import annotations

import datetime
from collections.abc import Sequence
from dataclasses import dataclass, field
from decimal import Decimal
from typing import Any

import numpy as np
import numpy.typing as npt
import pandas as pd

NumpyArray = npt.NDArray[Any]

MISSING = "has a missing value"


@dataclass
class Reading:
    """The arrays that one column gives, for all rows of a request.

    Attributes:
        arrays: Arrays by part; the part is "" or a suffix such as ".length".
        problems: Row -> why the row gets no prediction, as a clause that follows "column 'x'".
        masked: Whether each row is missing or contains a missing value, (rows,) bool.
    """

    arrays: dict[str, NumpyArray]
    masked: NumpyArray
    problems: dict[int, str] = field(default_factory=dict)

    @classmethod
    def of(cls, arrays: dict[str, NumpyArray], masked: NumpyArray, fills_nulls: bool) -> Reading:
        """Makes missing rows a problem unless the model was trained on missing values."""
        problems = {} if fills_nulls else dict.fromkeys(np.flatnonzero(masked).tolist(), MISSING)
        return cls(arrays, masked, problems)


def is_missing(value: Any) -> bool:
    if value is None or value is pd.NA or value is pd.NaT:
        return True
    return isinstance(value, float | np.floating) and bool(value != value)


def numbers_of(values: Any) -> tuple[NumpyArray, NumpyArray]:
    """Returns the numbers in their own dtype (0 if missing), and a mask of missing ones; both (rows,)."""
    plain = values.to_numpy() if isinstance(values, pd.Series) else values
    if isinstance(plain, np.ndarray) and plain.dtype.kind in "fbiu":
        missing = np.isnan(plain) if plain.dtype.kind == "f" else np.zeros(len(plain), bool)
        return np.where(missing, 0, plain) if missing.any() else plain, missing
    given = values.tolist() if hasattr(values, "tolist") else list(values)
    missing = np.fromiter((is_missing(value) for value in given), bool, len(given))
    for value, is_gone in zip(given, missing, strict=True):
        if not is_gone and not isinstance(value, bool | int | float | Decimal | np.number | np.bool_):
            raise ValueError(f"holds {shorten(value)}, which is not a number")
    filled = [0 if is_gone else value for value, is_gone in zip(given, missing, strict=True)]
    made = np.array([float(v) if isinstance(v, Decimal) else v for v in filled])
    return made if made.dtype.kind in "fbiu" else made.astype(np.float64), missing


def to_dtype(values: NumpyArray, dtype: str) -> NumpyArray:
    """Converts numbers to a dtype. Raises ValueError if an integer dtype cannot hold a number exactly."""
    wanted = np.dtype(dtype or "float32")
    if wanted.kind not in "iu" or not values.size:
        with np.errstate(over="ignore"):
            return values.astype(wanted)
    with np.errstate(invalid="ignore"):
        whole = values.astype(wanted)
    wrong = values[(whole != values) | ((whole < 0) != (values < 0))]
    if len(wrong):
        raise ValueError(
            f"held {wanted} numbers in the training, but now holds {shorten(wrong.flat[0])}; give whole "
            f"numbers in the range of {wanted}"
        )
    return whole


def to_network_input(values: NumpyArray) -> NumpyArray:
    """Returns fp32 for floats and booleans, and int64 for integers."""
    dtype = np.float32 if values.dtype.kind in "fb" else np.int64
    with np.errstate(over="ignore"):
        return np.require(values, dtype, ["C", "W"])


def microseconds(values: Sequence[Any], zone: str) -> tuple[NumpyArray, NumpyArray]:
    """Returns int64 microseconds since 1970 UTC, and a mask of missing values.

    A time without an offset is in `zone`. If `zone` is "", offsets are ignored: all times count as UTC.
    """
    found = np.zeros(len(values), np.int64)
    missing = np.zeros(len(values), bool)
    for row, value in enumerate(values):
        if is_missing(value):
            missing[row] = True
            continue
        if not isinstance(value, str | datetime.date | np.datetime64):
            raise ValueError(f"holds {shorten(value)}, which is not a date or time")
        try:
            moment = pd.Timestamp(value)
        except ValueError:
            raise ValueError(f"holds {shorten(value)}, which is not a date or time") from None
        if not zone:
            moment = moment.replace(tzinfo=None)
        elif moment.tzinfo is None:
            # Like Spark: an ambiguous time is the earlier one, and a skipped time moves one hour forward.
            moment = moment.tz_localize(zone, ambiguous=True, nonexistent=pd.Timedelta("1h"))
        found[row] = moment.to_datetime64().astype("datetime64[us]").astype(np.int64)
    return found, missing


def temporal_numbers(values: Sequence[Any], source: str, zone: str) -> tuple[NumpyArray, NumpyArray]:
    """Returns days ("date") or microseconds (timestamps) since 1970, and a mask of missing values."""
    is_local = source != "timestamp"
    found, missing = microseconds(values, "" if is_local else zone)
    return found // 86_400_000_000 if source == "date" else found, missing


def at_path(values: Sequence[Any], path: Sequence[str]) -> list[Any]:
    """Returns a nested field of each struct (a dict); None if a struct is missing."""
    found = list(values)
    for part in path:
        for row, value in enumerate(found):
            if is_missing(value):
                found[row] = None
                continue
            struct = value.asDict() if hasattr(value, "asDict") else value
            if not isinstance(struct, dict):
                raise ValueError(f"holds {shorten(value)}, but it must be a dict with the key {part!r}")
            if part not in struct:
                raise ValueError(f"lacks the key {part!r} in {shorten(value)}")
            found[row] = struct[part]
    return found


def array_of(value: Any) -> NumpyArray:
    """Returns the array of one row: a (nested) list, an array, or a vector of Spark, also as JSON."""
    if hasattr(value, "toArray"):
        return np.asarray(value.toArray())
    if isinstance(value, dict) and "values" in value:
        if value.get("indices") is None:
            return np.asarray(value["values"])
        dense = np.zeros(int(value["size"]))
        dense[np.asarray(value["indices"], np.int64)] = value["values"]
        return dense
    if not isinstance(value, list | tuple | np.ndarray):
        raise ValueError(f"holds {shorten(value)}, which is not a list of numbers")
    try:
        return np.array(value)
    except ValueError:
        raise ValueError("holds nested lists of different lengths") from None


def shorten(value: Any) -> str:
    text = repr(value.item() if isinstance(value, np.generic) else value)
    return text if len(text) <= 60 else f"{text[:57]}..."
