"""Ranges of a search's space; optuna draws a trial's values from them.

A range that holds only plain data has a JSON form, so a search can be saved without pickle.
"""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np


class _Numbers:
    """Base class of the ranges of numbers."""

    low: Any
    high: Any
    log: bool
    step: Any

    def draw(self, generator: np.random.Generator) -> Any:
        """Returns a uniformly drawn value."""
        if self.log:
            # Widen an integer range by 0.5 at both ends, so that rounding does not disfavor the ends.
            half = 0.5 if isinstance(self.low, int) else 0.0
            drawn = math.exp(generator.uniform(math.log(self.low - half), math.log(self.high + half)))
            return min(self.high, max(self.low, round(drawn) if half else drawn))
        if self.step is None:
            return float(generator.uniform(self.low, self.high))
        return min(self.high, self.low + self.step * int(generator.integers(self._num_steps + 1)))

    def scaled(self, value: Any, factor: float) -> Any:
        """Returns the value times a factor, limited to the range; returns a value of `Choice` unchanged."""
        scaled = value * factor
        if self.step is None:
            return min(self.high, max(self.low, scaled))
        # At least one step, unless the factor changes nothing.
        steps = round((scaled - value) / self.step) or (scaled > value) - (scaled < value)
        return min(self.low + self._num_steps * self.step, max(self.low, value + steps * self.step))

    def ends(self) -> list[Any]:
        """Returns the values to check for the whole range: both ends, or all values of a `Choice`."""
        return [self.low, self.high]

    @property
    def _num_steps(self) -> int:
        # A sum of floats may end just below `high`.
        return int((self.high - self.low) / self.step + 1e-9)

    def _check(self) -> None:
        kind = type(self).__name__
        if self.low > self.high:
            raise ValueError(f"low of {kind} must not exceed high, got low {self.low} and high {self.high}")
        if self.step is not None and not self.step > 0:
            raise ValueError(f"step of {kind} must be above 0, got {self.step}")
        if self.log and not self.low > 0:
            raise ValueError(f"low of {kind} must be above 0 with log=True, got {self.low}")
        if self.log and self.step not in (None, 1):
            raise ValueError(f"{kind} takes log or step, not both; got step {self.step}")


@dataclass(frozen=True)
class Uniform(_Numbers):
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
        self._check()
        for name in ("low", "high"):
            object.__setattr__(self, name, float(getattr(self, name)))

    def suggest(self, trial: Any, name: str) -> float:
        """Returns the trial's value for `name`; at the first call optuna draws it."""
        return float(trial.suggest_float(name, self.low, self.high, step=self.step, log=self.log))

    def to_json(self) -> dict[str, Any]:
        return {"uniform": asdict(self)}


@dataclass(frozen=True)
class IntRange(_Numbers):
    """Whole numbers from `low` to `high`, both included, in steps of `step`."""

    low: int
    high: int
    log: bool = False
    step: int = 1

    def __post_init__(self) -> None:
        for name, value in (("low", self.low), ("high", self.high), ("step", self.step)):
            if isinstance(value, bool) or not isinstance(value, int):
                raise ValueError(f"{name} of IntRange must be a whole number, got {value!r}")
        self._check()

    def suggest(self, trial: Any, name: str) -> int:
        return int(trial.suggest_int(name, self.low, self.high, step=self.step, log=self.log))

    def to_json(self) -> dict[str, Any]:
        return {"int_range": asdict(self)}


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

    def draw(self, generator: np.random.Generator) -> Any:
        return self.values[int(generator.integers(len(self.values)))]

    def scaled(self, value: Any, factor: float) -> Any:
        return value

    def ends(self) -> list[Any]:
        return list(self.values)

    def to_json(self) -> dict[str, Any] | None:
        """Returns the JSON form, or None if a value has none."""
        try:
            is_plain = all(json.loads(json.dumps(value)) == value for value in self.values)
        except (TypeError, ValueError):
            return None
        return {"choice": {"values": list(self.values)}} if is_plain else None

    def _labels(self) -> list[Any]:
        """Returns the labels of the values in optuna's records: the values themselves, or unique texts."""
        labels: list[Any] = []
        for number, value in enumerate(self.values):
            is_plain = value is None or type(value) in (bool, int, float, str)
            label = value if is_plain else str(getattr(value, "__qualname__", repr(value)))
            # 1, 1.0 and True are one key of a dict.
            is_new = all(label != known for known in labels)
            labels.append(label if is_new else f"{number}: {label}")
        return labels


SearchRange = Uniform | IntRange | Choice


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
