"""The options of compressors: declared once, and checked where they are set."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from math import isfinite
from typing import Any

import numpy as np

from ringspark.estimators.names import nearest


@dataclass(frozen=True, kw_only=True)
class Option:
    """One option of a compressor.

    Attributes:
        default: Its value where the user gives none; the type decides which values are taken.
        holds: Whether a value of that type is in the range.
        rule: The range in words: "{name} must be <rule>".
        words: Its meaning.
    """

    default: Any
    holds: Callable[[Any], bool]
    rule: str
    words: str


AFTER = Option(
    default=0,
    holds=lambda steps: bool(steps >= 0),
    rule="a number of steps, 0 or more",
    words="optimizer steps before the first compressed one",
)
LEAST = Option(
    default=1024,
    holds=lambda elements: bool(elements >= 1),
    rule="a number of elements of at least 1",
    words="tensors of fewer elements travel whole, as those of one dimension do",
)
BETWEEN = Option(
    default="workers",
    holds=lambda ends: ends in ("workers", "hosts"),
    rule="'workers' or 'hosts'",
    words="ends of the compressed exchange: all workers, or hosts, each of which sums whole gradients inside",
)


def feedback(default: bool) -> Option:
    return Option(
        default=default,
        holds=lambda _: True,
        rule="True or False",
        words="whether what was not sent is added to the next step's gradient",
    )


def ratio(default: float, words: str) -> Option:
    return Option(
        default=default,
        holds=lambda share: bool(0 < share <= 1),
        rule="a share above 0 and at most 1",
        words=words,
    )


def resolved(subject: str, given: Mapping[str, Any], options: Mapping[str, Option]) -> dict[str, Any]:
    """Returns the values of all options, those that the user gives and the defaults of the others.

    Raises:
        ValueError: An option is unknown, or its value has another type or is outside its range.
    """
    values = {name: option.default for name, option in options.items()}
    for name, value in given.items():
        if name not in options:
            raise ValueError(
                f"{subject} takes {', '.join(options)}, got {name!r}{nearest(str(name), options)}"
            )
        option = options[name]
        # Grids of values are often made by NumPy.
        plain = value.item() if isinstance(value, np.generic) else value
        converted = float(plain) if isinstance(option.default, float) and type(plain) is int else plain
        is_typed = type(converted) is type(option.default)
        if isinstance(converted, float):
            is_typed = is_typed and isfinite(converted)
        if not is_typed or not option.holds(converted):
            raise ValueError(f"{subject}: {name} must be {option.rule}, got {value!r}")
        values[name] = converted
    return values
