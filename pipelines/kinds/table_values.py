"""Computes in Python the doubles and texts that `TableRow.select` computes in Spark, from pandas or Arrow."""

from __future__ import annotations

import datetime
import re
from decimal import ROUND_HALF_UP, Context, Decimal, localcontext
from typing import Any

import numpy as np
import pyarrow as pa

from ringspark.pipelines.kinds.values import microseconds, shorten, to_list, to_numbers

# A date in ISO 8601 (the day is optional) or with slashes or dots; a time and a time zone may follow.
_TIME = re.compile(
    r"\s*(?:(?P<iso>\+?\d{4}-\d\d?(?:-\d\d?)?)|(?P<whole>\d{4}([/.])\d\d?\3\d\d?)|"
    r"(?P<short>\d\d?([/.-])\d\d?\5\d{4}))"
    r"(?:[ T](?P<time>\d\d?(?::\d\d?(?::\d\d?(?:\.\d*)?)?)?)\s*(?P<zone>[A-Za-z+-].*?)?)?\s*"
)
_OFFSET = re.compile(r"(?:UTC|GMT|UT)?(?:([+-])(\d\d?)(?::?(\d\d))?)?|Z")


def is_text(type_name: str) -> bool:
    """Whether a Spark type is text."""
    return type_name.startswith(("string", "char", "varchar"))


def items_of(values: Any, item: int, length: int | None) -> list[Any]:
    """Returns an item of each array or vector."""
    return [None if value is None else _dense(value, length)[item] for value in to_list(values)]


def _dense(value: Any, length: int | None) -> Any:
    if hasattr(value, "toArray"):
        value = value.toArray()
    elif isinstance(value, dict) and value.get("indices") is not None:
        known = dict(zip(value["indices"], value["values"], strict=True))
        value = [known.get(place, 0.0) for place in range(value["size"])]
    elif isinstance(value, dict) and "values" in value:
        value = value["values"]
    if not isinstance(value, list | tuple | np.ndarray):
        raise ValueError(f"holds {shorten(value)}, which is not a list of numbers")
    if length is not None and len(value) != length:
        raise ValueError(
            f"is in an array of {len(value)} numbers; give arrays of {length}, as in the training"
        )
    return value


def words_of(values: Any, type_name: str) -> Any:
    words = {True: "true", False: "false"}
    found = [words[bool(v)] if isinstance(v, bool | np.bool_) else v for v in to_list(values)]
    for value in found:
        if not isinstance(value, str | None):
            raise ValueError(f"holds {shorten(value)}, but the model was trained on {type_name}")
    return pa.array(found, pa.string())


def doubles_of(values: Any, type_name: str, origin: int) -> Any:
    """Returns numbers, or numbers in texts, minus `origin`; null for another text."""
    if origin or is_text(type_name):
        is_whole = "decimal" not in type_name
        return pa.array([_number_of(value, origin, is_whole) for value in to_list(values)], pa.float64())
    # A column of floats holds floats in Spark, but JSON holds doubles.
    dtype = "float32" if type_name in ("float", "array<float>") else "float64"
    return to_numbers(values, dtype).cast(pa.float64())


def _number_of(value: Any, origin: int, is_whole: bool) -> float | None:
    if value is None or (isinstance(value, str) and "_" in value):
        return None
    try:
        if not origin:
            return float(value)
        exact = Decimal(str(value).strip())
        with localcontext(Context(prec=80)):
            return float((exact.quantize(Decimal(1), ROUND_HALF_UP) if is_whole else exact) - origin)
    except (TypeError, ValueError, ArithmeticError):
        return None


def seconds_of(values: Any, type_name: str, zone: str, day_first: bool) -> Any:
    """Returns seconds since 1970: of UTC if there is a `zone`, else of the local time."""
    given = to_list(values)
    if is_text(type_name):
        given = [time_of_text(value, day_first) for value in given]
    micros, missing = microseconds(given, zone)
    whole = micros // 1_000_000
    seconds = micros / 1e6 if zone else whole - whole % 86_400 if type_name == "date" else whole
    return pa.array(seconds.astype(np.float64), mask=missing)


def time_of_text(value: Any, day_first: bool) -> datetime.datetime | None:
    """Reads a text as `table_row.time_of` does in Spark; None if it has no date."""
    import pandas as pd

    found = _TIME.fullmatch(value) if isinstance(value, str) else None
    if found is None:
        return None
    if text := found["iso"] or found["whole"]:
        year, month, day = (*re.split(r"\D", text.lstrip("+")), "1")[:3]
    else:
        first, second, year = re.split(r"\D", found["short"])
        day, month = (first, second) if day_first or "." in found["short"] else (second, first)
    hour, minute, seconds = ((found["time"] or "0") + ":0:0").split(":")[:3]
    whole, _, fraction = seconds.partition(".")
    try:
        date, time = f"{int(year):04}-{int(month):02}-{int(day):02}", f"{int(hour):02}:{int(minute):02}"
        moment = pd.Timestamp(f"{date}T{time}:{int(whole):02}.{fraction[:6]:0<6}")
        offset = _OFFSET.fullmatch(found["zone"] or "Z")
        if found["zone"] is None:
            return moment
        if offset is None:
            if found["time"].count(":") < 2 or found["zone"].islower():
                return None
            return moment.tz_localize(found["zone"], ambiguous=True, nonexistent=pd.Timedelta("1h"))
        sign, hours, minutes = (offset[1] or "+", int(offset[2] or 0), int(offset[3] or 0))
        shift = datetime.timedelta(hours=hours, minutes=minutes) * (-1 if sign == "-" else 1)
        return moment.tz_localize(datetime.timezone(shift))
    except (ValueError, KeyError):  # such as the 30th of February, or an unknown zone
        return None
