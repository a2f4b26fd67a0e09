"""Params of `SequenceWindows`, and a parser for durations."""

from __future__ import annotations

import re
from datetime import timedelta
from typing import Any

from pyspark.ml.param.shared import HasLabelCol, HasOutputCol, HasOutputCols

from ringspark.estimators.options.base import at_least, one_of
from ringspark.estimators.stages.declared import DeclaredParams, declared, param_of, setter
from ringspark.estimators.training.settings.declaration import Setting

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


def _setting(name: str, words: str, **more: Any) -> Setting[Any]:
    return Setting(name=name, words=words, **more)


_OUTPUT_COL = _setting("outputCol", "column of the windows, an array of steps x numbers", default="features")
_OUTPUT_COLS = _setting(
    "outputCols",
    "one column of windows for each of valueCols, instead of outputCol: arrays of steps values of its type",
    kind="names",
)
_LABEL_COL = _setting(
    "labelCol", "column of the label: the target's next value, or an array", default="label"
)
_STRIDE = _setting("stride", "rows between the ends of two windows", default=1, accepts=at_least(1))
_HORIZON = _setting(
    "horizon",
    "number of rows after a window that give the label: 1 gives a value, more give an array",
    default=1,
    accepts=at_least(1),
)
_HANDLE_INVALID = _setting(
    "handleInvalid",
    "nulls in keys, time, values or target: 'error', or 'skip' to drop rows without key or time and windows "
    "that hold a null",
    default="error",
    accepts=one_of(("error", "skip")),
)
_HANDLE_UNLABELED = _setting(
    "handleUnlabeled",
    "windows with missing targets, such as the windows of the newest rows: 'skip' to drop them, 'keep' to "
    "keep them with a null label, for a forecast",
    default="skip",
    accepts=one_of(("skip", "keep")),
)


class _WindowParams(DeclaredParams, HasOutputCol, HasOutputCols, HasLabelCol):
    keyCols, getKeyCols, setKeyCols = declared(
        _setting("keyCols", "columns that identify a series; an empty list for one series", kind="names")
    )
    timeCol, getTimeCol, setTimeCol = declared(
        _setting("timeCol", "column that orders a series: timestamp, date or whole numbers", kind="str")
    )
    valueCols, getValueCols, setValueCols = declared(
        _setting("valueCols", "columns of the history: numbers, booleans, arrays or vectors", kind="names")
    )
    steps, getSteps, setSteps = declared(
        _setting("steps", "rows in a window, including the current row", kind="int", accepts=at_least(1))
    )
    stride, getStride, setStride = declared(_STRIDE)
    targetCol, getTargetCol, setTargetCol = declared(
        _setting("targetCol", "column whose next values are the label; unset: no label is added", kind="str")
    )
    horizon, getHorizon, setHorizon = declared(_HORIZON)
    maxGap, getMaxGap, setMaxGap = declared(
        _setting(
            "maxGap",
            "longest time between neighbours in a window and its targets, such as '1 hour'; after a longer "
            "gap the series starts again. Unset: any gap is allowed",
            convert=_gap,
        )
    )
    outputCol, setOutputCol = param_of(_OUTPUT_COL), setter(_OUTPUT_COL)
    outputCols, setOutputCols = param_of(_OUTPUT_COLS), setter(_OUTPUT_COLS)
    labelCol, setLabelCol = param_of(_LABEL_COL), setter(_LABEL_COL)
    targetTimeCol, getTargetTimeCol, setTargetTimeCol = declared(
        _setting(
            "targetTimeCol",
            "added column with the time of the last target, for splits by time; unset: no column is added",
            kind="str",
        )
    )
    handleInvalid, getHandleInvalid, setHandleInvalid = declared(_HANDLE_INVALID)
    handleUnlabeled, getHandleUnlabeled, setHandleUnlabeled = declared(_HANDLE_UNLABELED)

    def __init__(self) -> None:
        super().__init__()
        defaults = (_HORIZON, _STRIDE, _OUTPUT_COL, _LABEL_COL, _HANDLE_INVALID, _HANDLE_UNLABELED)
        self._setDefault(**{setting.name: setting.default for setting in defaults})
