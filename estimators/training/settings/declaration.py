"""How a setting is declared, once: its names, words, type, default and range, and what follows from it.

Everything that speaks of a setting reads its declaration: the stages' Params, `TrainConfig` and its rules,
the identity of a run, the warnings about settings without effect, the jobs' options and docs/settings.md. So
one mistake has one sentence, wherever it is made. Nothing here imports Spark or torch, so that `--help` of a
job answers at once.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Generic, Literal, TypeVar

T = TypeVar("T")

Kind = Literal["int", "float", "bool", "str", "names", "numbers", "object"]
"""The type of a setting's value; "object" for one that only its own `convert` can judge."""


@dataclass(frozen=True)
class Range:
    """The values that a setting takes.

    Attributes:
        holds: Whether a value of the right type is one of them.
        rule: The predicate of the refusing sentence, "must be ...".
        remedy: What to do, where the rule does not say it.
        choices: All values, where they are a few words.
    """

    holds: Callable[[Any], bool]
    rule: Callable[[], str]
    remedy: str = ""
    choices: tuple[str, ...] = ()


@dataclass(frozen=True, kw_only=True)
class Setting(Generic[T]):
    """One setting of the estimators.

    Attributes:
        name: Of the Spark Param, in camelCase: the name that users know.
        words: What it means, for `explainParams()`, docs/settings.md and the jobs' `--help`.
        default: None where it is unset without a value of the user's.
        field: The field of `TrainConfig` that holds it; empty where the ranks need not know it.
        accepts: The range of a value of the right type; None where every value can be used.
        convert: From what a user writes to what a stage keeps, where `kind` does not say it.
        may_differ_on_resume: Whether a run may go on with another value than it was started with.
        without_effect: When a value that was set changes nothing, judged by all settings by name, and why.
        is_for_writing: Whether it only decides how rows become shards, which `fitOnShards` has already.
        default_words: The default in words, where it depends on what is installed.
    """

    name: str
    words: str
    kind: Kind
    default: T
    field: str = ""
    accepts: Range | None = None
    convert: Callable[[Any], Any] | None = None
    may_differ_on_resume: bool = False
    without_effect: tuple[Callable[[Mapping[str, Any]], bool], str] | None = None
    is_for_writing: bool = False
    default_words: str = ""

    def refusal(self, value: Any) -> str:
        """The predicate and the rest of the sentence that refuses a value; empty where it can be used."""
        if self.accepts is None or (value is None and self.default is None) or self.accepts.holds(value):
            return ""
        return f"{self.accepts.rule()}, got {value!r}{self.accepts.remedy}"

    def check(self, value: Any) -> None:
        """Refuses a value outside the range.

        Raises:
            ValueError: One sentence with the setting, the rule and the value.
        """
        if refusal := self.refusal(value):
            raise ValueError(f"{self.name} {refusal}")

    def from_text(self, text: str) -> Any:
        """The value that an option of a command line gives.

        Raises:
            ValueError: The sentence of `check` without its subject, which the command line names.
        """
        value: Any = text
        if self.kind in ("int", "float"):
            try:
                value = int(text) if self.kind == "int" else float(text)
            except ValueError:
                what = "a whole number" if self.kind == "int" else "a number"
                raise ValueError(f"must be {what}, got {text!r}") from None
        if refusal := self.refusal(value):
            raise ValueError(refusal)
        return value


def at_least(least: int, unit: str = "", remedy: str = "") -> Range:
    rule = f"must be at least {least}{unit and ' '}{unit}"
    return Range(lambda value: bool(value >= least), lambda: rule, remedy and f"; {remedy}")


def not_negative() -> Range:
    return Range(lambda value: bool(value >= 0), lambda: "must not be negative")


def above_0(remedy: str = "") -> Range:
    return Range(lambda value: bool(value > 0), lambda: "must be above 0", remedy and f"; {remedy}")


def above_0_and_finite() -> Range:
    return Range(lambda value: 0 < value < math.inf, lambda: "must be above 0 and finite")


def finite_from_0(remedy: str) -> Range:
    return Range(lambda value: 0 <= value < math.inf, lambda: "must be 0 or above and finite", f"; {remedy}")


def one_of(choices: Sequence[str]) -> Range:
    """A few words that never change."""
    *first, last = (repr(choice) for choice in choices)
    rule = f"must be {', '.join(first)} or {last}"
    return Range(lambda value: value in choices, lambda: rule, choices=tuple(choices))


def listed(registry: Callable[[], Iterable[str]]) -> Range:
    """The names of a registry as it is when a value is checked: what is listed there can be used."""
    return Range(lambda value: value in registry(), lambda: f"must be one of {', '.join(sorted(registry()))}")
