"""Computes the numbers and category ids of table rows, like ringspark's column type "table_row"."""

from __future__ import annotations

import datetime
import re
from collections.abc import Mapping, Sequence
from decimal import ROUND_HALF_UP, Context, Decimal, localcontext
from functools import lru_cache
from typing import Any

import numpy as np
import pandas as pd

from .values import NumpyArray, Reading, array_of, at_path, is_missing, microseconds, numbers_of, shorten

_DAY = 86_400.0
# A date in ISO 8601 (the day is optional) or with slashes or dots; a time and a time zone may follow.
_TIME = re.compile(
    r"\s*(?:(?P<iso>\+?\d{4}-\d\d?(?:-\d\d?)?)|(?P<whole>\d{4}([/.])\d\d?\3\d\d?)|"
    r"(?P<short>\d\d?([/.-])\d\d?\5\d{4}))"
    r"(?:[ T](?P<time>\d\d?(?::\d\d?(?::\d\d?(?:\.\d*)?)?)?)\s*(?P<zone>[A-Za-z+-].*?)?)?\s*"
)
_OFFSET = re.compile(r"(?:UTC|GMT|UT)?(?:([+-])(\d\d?)(?::?(\d\d))?)?|Z")
_NULL_WORD = "\0null"
_PERIODS = {"hour": 1.0, "weekday": 7.0, "monthday": 31.0, "yearday": 365.2425}


def read_table(columns: Mapping[str, pd.Series[Any]], kind: dict[str, Any]) -> Reading:
    """Returns `.numbers`, (rows, M) fp32 with NaN for missing numbers, and `.ids`, (rows, K) int64."""
    rows = len(next(iter(columns.values())))
    numbers = [np.zeros((rows, 0), np.float32)]
    ids = []
    for column in kind["columns"]:
        try:
            values = _values(columns[column["name"]], column)
            if column["form"] == "words":
                ids.append(_word_ids(values, column))
            elif column["form"] == "levels":
                ids.append(_level_ids(_doubles(values, column), column["levels"]))
            elif column["form"] == "calendar":
                numbers.append(_calendar_numbers(_seconds(values, column), column))
            else:
                numbers.append(_standardize(_doubles(values, column), column)[:, None].astype(np.float32))
        except ValueError as error:
            raise ValueError(f"{column['name']!r} {error}") from None
    made = np.stack(ids, axis=1) if ids else np.zeros((rows, 0), np.int64)
    arrays = {".numbers": np.concatenate(numbers, axis=1), ".ids": made}
    return Reading(arrays, np.zeros(rows, bool))


def _values(values: Any, column: dict[str, Any]) -> Any:
    if column["path"]:
        values = at_path(values.tolist(), column["path"])
    if column["item"] is None:
        return values
    return [None if is_missing(value) else _item(array_of(value), column) for value in values]


def _item(array: NumpyArray, column: dict[str, Any]) -> Any:
    if len(array) != column["length"]:
        raise ValueError(f"has an array of {len(array)} numbers; give arrays of {column['length']}")
    return array[column["item"]]


def _doubles(values: Any, column: dict[str, Any]) -> NumpyArray:
    if column["origin"] or _is_text(column):
        return np.array([_number(value, column) for value in values], np.float64)
    found, missing = numbers_of(values)
    if column["type"] in ("float", "array<float>"):
        # In Spark the column holds floats, but JSON holds doubles.
        found = found.astype(np.float32)
    doubles: NumpyArray = np.where(missing, np.nan, found.astype(np.float64))
    return doubles


def _is_text(column: dict[str, Any]) -> bool:
    return str(column["type"]).startswith(("string", "varchar", "char"))


def _number(value: Any, column: dict[str, Any]) -> float:
    """Returns a number, or a text of one, minus the column's origin; NaN for another text."""
    if is_missing(value) or (isinstance(value, str) and "_" in value):
        return np.nan
    try:
        if not column["origin"]:
            return float(value)
        exact = Decimal(str(value).strip())
        with localcontext(Context(prec=80)):
            if "decimal" not in column["type"]:
                exact = exact.quantize(Decimal(1), ROUND_HALF_UP)
            return float(exact - column["origin"])
    except (TypeError, ValueError, ArithmeticError):
        return np.nan


def _standardize(values: NumpyArray, column: dict[str, Any]) -> NumpyArray:
    values = np.where(np.isfinite(values), values, np.nan)
    with np.errstate(invalid="ignore", over="ignore"):
        standard: NumpyArray = np.clip(
            (values - column["center"]) / column["scale"], column["low"], column["high"]
        )
    return standard


def _word_ids(values: Any, column: dict[str, Any]) -> NumpyArray:
    known = _word_set(tuple(column["words"]))
    ids = np.zeros(len(values), np.int64)
    for row, value in enumerate(values):
        if is_missing(value):
            word = _NULL_WORD
        elif isinstance(value, bool | np.bool_):
            word = "true" if value else "false"
        elif isinstance(value, str):
            word = value
        else:
            raise ValueError(f"holds {shorten(value)}, but the model was trained on {column['type']}")
        ids[row] = known.get(word, 0)
    return ids


@lru_cache(maxsize=256)
def _word_set(words: tuple[str, ...]) -> dict[str, int]:
    return {word: number for number, word in enumerate(words, start=1)}


def _level_ids(values: NumpyArray, levels: Sequence[float]) -> NumpyArray:
    known = np.array(levels)
    place = np.minimum(np.searchsorted(known, values), len(known) - 1)
    ids: NumpyArray = np.where(known[place] == values, place + 1, 0).astype(np.int64)
    return ids


def _seconds(values: Any, column: dict[str, Any]) -> NumpyArray:
    """Returns seconds since 1970 on the clock of the column's time zone; NaN for missing times."""
    zone = column["zone"]
    if _is_text(column):
        values = [_time_of(value, column["day_first"]) for value in values]
    found, missing = microseconds(list(values), zone)
    if zone:
        seconds = _on_clock(found / 1e6, zone)
    else:
        whole = found // 1_000_000
        seconds = (whole - whole % 86_400 if column["type"] == "date" else whole).astype(np.float64)
    return np.where(missing, np.nan, seconds)


def _on_clock(seconds: NumpyArray, zone: str) -> NumpyArray:
    # Beyond the times of pandas, the UTC offset is constant.
    within = np.clip(seconds, -9.2e9, 9.2e9)
    shown = pd.to_datetime(pd.Series(within), unit="s", utc=True).dt.tz_convert(zone).dt.tz_localize(None)
    found: NumpyArray = ((shown - pd.Timestamp(0)) / pd.Timedelta(seconds=1)).to_numpy(np.float64)
    local: NumpyArray = seconds + (found - within)
    return local


def _time_of(value: Any, day_first: bool) -> pd.Timestamp | None:
    """Reads a text as ringspark's `time_of` does in Spark; None if it has no date."""
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


def _calendar_numbers(seconds: NumpyArray, column: dict[str, Any]) -> NumpyArray:
    found = [_standardize(seconds, column)] if column["has_trend"] else []
    for name in column["parts"]:
        turn = _calendar(name, seconds) / _PERIODS[name]
        found += [turn * 4 - 2, np.sin(2 * np.pi * turn), np.cos(2 * np.pi * turn)]
    return np.stack(found, axis=1).astype(np.float32)


def _calendar(part: str, seconds: NumpyArray) -> NumpyArray:
    days = np.floor(seconds / _DAY)
    if part == "hour":
        return seconds / _DAY - days
    if part == "weekday":
        weekday: NumpyArray = (days + 3) % 7  # 1970-01-01 was a Thursday
        return weekday
    known = np.where(np.isfinite(days), days, 0).astype("datetime64[D]")
    start = known.astype("datetime64[M]" if part == "monthday" else "datetime64[Y]").astype("datetime64[D]")
    return np.where(np.isfinite(days), (known - start).astype(np.float64), np.nan)
