"""Declares a setting once for the stages' Params, `TrainConfig`, the jobs' options and docs/settings.md.

Nothing here imports Spark or torch, so that `--help` of a job answers at once.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Generic, Literal, TypeVar

from ringspark.estimators.options.base import Options, ValueRange

T = TypeVar("T")

Kind = Literal["int", "float", "bool", "str", "names", "numbers", "object"]
"""The type of a setting's value; "object" if the setting's `convert` checks it."""

_TYPE_RULES: dict[Kind, str] = {
    "int": "must be a whole number",
    "float": "must be a number",
    "bool": "must be True or False",
    "str": "must be a text",
    "names": "must be a name or a list of names",
    "numbers": "must be a list of numbers",
}


@dataclass(frozen=True, kw_only=True)
class Setting(Generic[T]):
    """One setting of the estimators.

    Attributes:
        name: Name of the Spark Param in camelCase, which users know.
        words: Meaning, for `explainParams()`, docs/settings.md and the jobs' `--help`.
        kind: Type of the value. If left out, it is the type of `default`, or "object" if `convert` is set.
        default: Default value; None if the setting has none.
        field: Field of `TrainConfig` that holds the value; empty if the ranks do not need it.
        accepts: Range of a value of the right type; None if every value can be used.
        convert: Converts and checks a user's value; None if a check of `kind` is enough.
        options: Dataclass of the value, if it has options.
        may_differ_on_resume: Whether a resumed run may have another value than its first start.
        recorded_on_resume: The same, but the run records the change, because it changes the result.
        without_effect: A predicate (all settings by name), True if a set value is unused, and the reason.
        is_for_writing: Whether it only decides how rows become shards, so `fitOnShards` ignores it.
        default_words: The default in words, if it depends on what is installed.
        empty_is_unset: Whether an empty text means the same as no value, as in Spark ML's own stages.
    """

    name: str
    words: str
    kind: Kind = "object"
    default: T = None  # type: ignore[assignment]  # of a `Setting[... | None]`
    field: str = ""
    accepts: ValueRange | None = None
    convert: Callable[[Any], Any] | None = None
    options: type[Options] | None = None
    may_differ_on_resume: bool = False
    recorded_on_resume: bool = False
    without_effect: tuple[Callable[[Mapping[str, Any]], bool], str] | None = None
    is_for_writing: bool = False
    default_words: str = ""
    empty_is_unset: bool = False

    def __post_init__(self) -> None:
        if self.options is not None and self.convert is None:
            object.__setattr__(self, "convert", self.convert_options)
        if self.kind == "object" and self.convert is None:
            object.__setattr__(self, "kind", type(self.default).__name__)

    def convert_options(self, value: Any) -> Options | None:
        """Returns the value as an instance of `options`, or None if it is unset."""
        assert self.options is not None
        if self.default is None and value in (None, "none", {"name": "none"}):
            return None
        return self.options.of(value, self.name)

    def refusal(self, value: Any) -> str:
        """Returns the predicate of an error message about a value; "" if it is accepted."""
        if self.accepts is None or (value is None and self.default is None) or self.accepts.holds(value):
            return ""
        return f"{self.accepts.rule()}, got {value!r}{self.accepts.remedy}"

    def type_rule(self) -> str:
        """Returns the predicate of an error message about a value of the wrong type."""
        if self.kind == "str" and self.accepts is not None and self.accepts.rule().startswith("must be "):
            return self.accepts.rule()  # the choices
        return _TYPE_RULES[self.kind]

    def check(self, value: Any) -> None:
        """Raises ValueError for a value outside the range."""
        if refusal := self.refusal(value):
            raise ValueError(f"{self.name} {refusal}")

    def from_text(self, text: str) -> Any:
        """Parses a command-line option; raises ValueError with a message that lacks the option's name."""
        value: Any = text
        if self.kind in ("int", "float"):
            try:
                value = int(text) if self.kind == "int" else float(text)
            except ValueError:
                raise ValueError(f"{_TYPE_RULES[self.kind]}, got {text!r}") from None
        if refusal := self.refusal(value):
            raise ValueError(refusal)
        return value
