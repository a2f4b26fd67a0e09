"""Params of `SequenceWindows`, and a parser for durations."""

from __future__ import annotations

import re
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, Literal

from pyspark.ml.param.shared import HasLabelCol, HasOutputCol, HasOutputCols

from ringspark.estimators.options.checked import AtLeast1, Names
from ringspark.estimators.stages.declared import DeclaredParams, with_settings
from ringspark.estimators.training.settings.setting import Section, setting, settings_of

_MICROSECONDS = {
    "microsecond": 1,
    "millisecond": 1_000,
    "second": 1_000_000,
    "minute": 60_000_000,
    "hour": 3_600_000_000,
}
_DAYS = {"day": 1, "week": 7}
_PART = re.compile(r"\s*(\d+)\s*([a-z]+)\s*", re.IGNORECASE)


def days_and_microseconds(text: str) -> tuple[int, int]:
    """Parses a duration such as "1 hour" or "1 day 12 hours" to days and microseconds."""
    days, rest, place = 0, 0, 0
    while part := _PART.match(text, place):
        unit, place = part[2].lower().removesuffix("s"), part.end()
        if unit in _DAYS:
            days += int(part[1]) * _DAYS[unit]
        elif unit in _MICROSECONDS:
            rest += int(part[1]) * _MICROSECONDS[unit]
        else:
            place = -1
            break
    if place < len(text) or not days + rest:
        raise ValueError(
            "maxGap must be a duration such as '1 hour' or '2 days 12 hours', in units from microseconds to "
            f"weeks, or a whole number if timeCol holds whole numbers, got {text!r}"
        )
    return days, rest


def _gap(value: Any) -> str | int:
    if isinstance(value, timedelta):
        rest = (value - timedelta(days=value.days)) // timedelta(microseconds=1)
        value = f"{value.days} days {rest} microseconds"
    if isinstance(value, str):
        days_and_microseconds(value)
        return value
    if isinstance(value, int) and not isinstance(value, bool):
        if value < 1:
            raise ValueError(f"maxGap must be at least 1, got {value}")
        return value
    raise TypeError(f"maxGap must be a duration such as '1 hour', or a whole number, got {value!r}")


@dataclass(frozen=True, kw_only=True)
class Windows(Section):
    """Settings of `SequenceWindows`; transform requires keyCols, timeCol, valueCols and steps."""

    GROUP = "windows"
    ON_DRIVER = True

    key_cols: tuple[str, ...] = setting(None, "columns that identify a series; an empty list for one series")
    time_col: str = setting(None, "column that orders a series: timestamp, date or whole numbers")
    value_cols: Names = setting(None, "columns of the history: numbers, booleans, arrays or vectors")
    steps: AtLeast1 = setting(None, "rows in a window, including the current row")
    stride: AtLeast1 = setting(1, "rows between the ends of two windows")
    target_col: str | None = setting(None, "column whose next values are the label; unset: no label is added")
    horizon: AtLeast1 = setting(
        1, "number of rows after a window that give the label: 1 gives a value, more give an array"
    )
    max_gap: str | int | None = setting(
        None,
        "longest time between consecutive rows of a window and its targets, such as '1 hour'; after a longer "
        "gap the series starts again. Unset: any gap is allowed",
        convert=_gap,
    )
    output_col: str = setting("features", "column of the windows, an array of shape (steps, numbers per row)")
    output_cols: Names = setting(
        None,
        "one column of windows for each of valueCols, instead of outputCol: arrays of steps values of its "
        "type",
    )
    label_col: str = setting("label", "column of the label: the target's next value, or an array")
    target_time_col: str | None = setting(
        None,
        "added column with the time of the last target, for splits by time; unset: no column is added",
    )
    handle_invalid: Literal["error", "skip"] = setting(
        "error",
        "nulls in keys, time, values or target: 'error', or 'skip' to drop rows without key or time and "
        "windows that hold a null",
    )
    handle_unlabeled: Literal["skip", "keep"] = setting(
        "skip",
        "windows with missing targets, such as the windows of the newest rows: 'skip' to drop them, 'keep' "
        "to keep them with a null label, for a forecast",
    )


@with_settings(*settings_of(Windows).values())
class WindowParams(DeclaredParams, HasOutputCol, HasOutputCols, HasLabelCol):
    """The Params of `SequenceWindows`."""
