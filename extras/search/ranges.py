"""Ranges of a search's space; optuna draws a trial's values from them.

A range that holds only plain data has a JSON form, so a search can be saved without pickle.
"""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any, Protocol


class SearchRange(Protocol):
    def suggest(self, trial: Any, name: str) -> Any:
        """Returns the trial's value for `name`; at the first call optuna draws it."""

    def scaled(self, value: Any, factor: float) -> Any:
        """Returns a number times a factor, limited to the range; returns a value of `Choice` unchanged."""

    def ends(self) -> list[Any]:
        """Returns the values to check for the whole range: both ends, or all values of a `Choice`."""

    def to_json(self) -> dict[str, Any] | None:
        """Returns the JSON form, or None if there is none."""


@dataclass(frozen=True)
class Uniform:
    """Real numbers from `low` to `high`.

    If `log` is True, the logarithm is uniform. If `step` is given, the numbers are `low` plus multiples of
    it.
    """

    low: float
    high: float
    log: bool = False
    step: float | None = None

    def __post_init__(self) -> None:
        for name, value in (("low", self.low), ("high", self.high)):
            if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
                raise ValueError(f"{name} of Uniform must be a finite number, got {value!r}")
        _check(self)

    def suggest(self, trial: Any, name: str) -> float:
        return float(trial.suggest_float(name, self.low, self.high, step=self.step, log=self.log))

    def scaled(self, value: float, factor: float) -> float:
        scaled = value * factor
        if self.step is not None:
            scaled = value + _count_steps(value, scaled, self.step) * self.step
            last = self.low + math.floor((self.high - self.low) / self.step + 1e-9) * self.step
            return min(last, max(float(self.low), scaled))
        return float(min(self.high, max(self.low, scaled)))

    def ends(self) -> list[Any]:
        return [float(self.low), float(self.high)]

    def to_json(self) -> dict[str, Any] | None:
        return {"uniform": asdict(self)}


@dataclass(frozen=True)
class IntRange:
    """Whole numbers from `low` to `high`, both included, in steps of `step`."""

    low: int
    high: int
    log: bool = False
    step: int = 1

    def __post_init__(self) -> None:
        for name, value in (("low", self.low), ("high", self.high), ("step", self.step)):
            if isinstance(value, bool) or not isinstance(value, int):
                raise ValueError(f"{name} of IntRange must be a whole number, got {value!r}")
        _check(self)

    def suggest(self, trial: Any, name: str) -> int:
        return int(trial.suggest_int(name, self.low, self.high, step=self.step, log=self.log))

    def scaled(self, value: int, factor: float) -> int:
        scaled = value * factor
        last = self.low + (self.high - self.low) // self.step * self.step
        return min(last, max(self.low, value + _count_steps(value, scaled, self.step) * self.step))

    def ends(self) -> list[Any]:
        return [self.low, self.high]

    def to_json(self) -> dict[str, Any] | None:
        return {"int_range": asdict(self)}


def _count_steps(old: float, new: float, step: float) -> int:
    """Returns the difference as a rounded number of steps; at least one step unless the values are equal."""
    return round((new - old) / step) or (new > old) - (new < old)


def _check(given: Uniform | IntRange) -> None:
    kind = type(given).__name__
    if given.low > given.high:
        raise ValueError(f"low of {kind} must not exceed high, got low {given.low} and high {given.high}")
    if given.step is not None and not given.step > 0:
        raise ValueError(f"step of {kind} must be above 0, got {given.step}")
    if given.log and not given.low > 0:
        raise ValueError(f"low of {kind} must be above 0 with log=True, got {given.low}")
    if given.log and given.step not in (None, 1):
        raise ValueError(f"{kind} takes log or step, not both; got step {given.step}")


@dataclass(frozen=True, init=False)
class Choice:
    """One of several values, of any type that the Param accepts: numbers, strings, lists, ModelSpecs."""

    values: tuple[Any, ...]

    def __init__(self, values: Sequence[Any]) -> None:
        if isinstance(values, str) or not isinstance(values, Sequence) or not values:
            raise ValueError(f"Choice takes a list with at least one value, got {values!r}")
        object.__setattr__(self, "values", tuple(values))

    def suggest(self, trial: Any, name: str) -> Any:
        labels = self._labels()
        return self.values[labels.index(trial.suggest_categorical(name, labels))]

    def scaled(self, value: Any, factor: float) -> Any:
        return value

    def ends(self) -> list[Any]:
        return list(self.values)

    def to_json(self) -> dict[str, Any] | None:
        try:
            is_plain = all(json.loads(json.dumps(value)) == value for value in self.values)
        except (TypeError, ValueError):
            return None
        return {"choice": {"values": list(self.values)}} if is_plain else None

    def _labels(self) -> list[Any]:
        """Returns the labels of the values in optuna's records: the values themselves, or unique texts."""
        labels: list[Any] = []
        for number, value in enumerate(self.values):
            label = value if value is None or type(value) in (bool, int, float, str) else _text(value)
            # 1, 1.0 and True are one key of a dict.
            is_new = all(label != known for known in labels)
            labels.append(label if is_new else f"{number}: {label}")
        return labels


def _text(value: Any) -> str:
    try:
        return json.dumps(value)
    except (TypeError, ValueError):
        return str(getattr(value, "__qualname__", None) or repr(value))


def from_json(form: dict[str, Any]) -> SearchRange:
    kinds: dict[str, Any] = {"uniform": Uniform, "int_range": IntRange, "choice": Choice}
    if len(form) != 1:
        raise ValueError(f"a range has one key, {', '.join(kinds)}, got {form}")
    ((kind, fields),) = form.items()
    if kind not in kinds:
        raise ValueError(f"{kind!r} is not a range; choose one of {', '.join(kinds)}")
    try:
        found: SearchRange = kinds[kind](**fields)
    except TypeError as error:
        raise ValueError(f"the range {form} cannot be read: {error}; correct its arguments") from None
    return found
