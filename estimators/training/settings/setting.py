"""Declares a setting once: for the stages' Params, `TrainConfig`, job files, `--help` and the settings page.

A section is a frozen dataclass with settings as fields:

    @dataclass(frozen=True, kw_only=True)
    class Recovery(Section):
        max_restarts: NotNegative = setting(3, "how often lost workers are restarted ...")

The field `max_restarts` is the Param `maxRestarts`. `TrainConfig` inherits the sections that the ranks need.
Nothing here imports Spark, torch or pydantic, so that `--help` of a job stays fast.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, fields
from typing import Any, ClassVar, Literal, get_origin

from ringspark.estimators.names import check_name
from ringspark.estimators.options.checked import (
    WrongTypeError,
    check,
    either,
    parts_of,
    range_rule,
    type_rules,
)
from ringspark.estimators.options.declare import Options, hints_of


class Section:
    """Settings of one subject.

    Attributes:
        GROUP: Title of the section in `explainParams()` and `help`.
        ON_DRIVER: Whether only the driver reads these settings as given; `TrainConfig` lacks them.
        MAY_DIFFER_ON_RESUME: Default of `Setting.may_differ_on_resume` in this section.
    """

    GROUP: ClassVar[str] = ""
    ON_DRIVER: ClassVar[bool] = False
    MAY_DIFFER_ON_RESUME: ClassVar[bool] = False


@dataclass(frozen=True, kw_only=True)
class Setting:
    """One setting.

    Attributes:
        name: Name of the Spark Param in camelCase, which users know.
        hint: Type of the value, with its range.
        words: Meaning, for `explainParams()`, `help`, the settings page and the jobs' `--help`.
        default: Default value; None if the setting has none.
        field: Field of `TrainConfig` that holds the value; empty if the ranks do not need it.
        group: Title of its section.
        on_driver: Whether only the driver reads the value as given; `TrainConfig` omits it, or has it
            converted in `field`.
        convert: Converts a user's value before the type is checked; raises TypeError or ValueError.
        split: Splits a value into the part for `TrainConfig` and an object that JSON cannot describe, which
            `UserObjects` holds; None if the config holds the whole value.
        remedy: The user's remedy, if the rule of the range does not contain it.
        rule_words: Rule of the range on the settings page, if `convert` checks it.
        may_differ_on_resume: Whether a resumed run may have another value than its first start.
        recorded_on_resume: Like `may_differ_on_resume`, but it changes the result, so the run records it.
        without_effect: Pair of a predicate and a reason. The predicate takes all settings by name and returns
            True if the value is unused.
        is_for_writing: Whether it only decides how rows become shards, so `fitOnShards` ignores it.
        default_words: The default in words, if it depends on what is installed.
        empty_is_unset: Whether an empty string means the same as no value, as in Spark ML's own stages.
    """

    name: str
    hint: Any
    words: str
    default: Any = None
    field: str = ""
    group: str = ""
    on_driver: bool = False
    convert: Callable[[Any], Any] | None = None
    split: Callable[[Any], tuple[Any, Any]] | None = None
    remedy: str = ""
    rule_words: str = ""
    may_differ_on_resume: bool = False
    recorded_on_resume: bool = False
    without_effect: tuple[Callable[[Mapping[str, Any]], bool], str] | None = None
    is_for_writing: bool = False
    default_words: str = ""
    empty_is_unset: bool = False

    @property
    def kinds(self) -> list[Any]:
        """Types of the value, except None."""
        return [part.kind for part in parts_of(self.hint)]

    @property
    def options(self) -> type[Options] | None:
        """Class of the value, if it has options."""
        return next(
            (kind for kind in self.kinds if isinstance(kind, type) and issubclass(kind, Options)), None
        )

    @property
    def rule(self) -> str:
        """Rule of the range, such as "must be at least 1"; empty if there is none."""
        if self.rule_words:
            return self.rule_words
        has_choices = any(get_origin(kind) is Literal for kind in self.kinds)
        return f"must be {either(type_rules(self.hint))}" if has_choices else range_rule(self.hint)

    def check(self, value: Any) -> Any:
        """Returns the value converted to `hint`. Raises TypeError for a wrong type, else ValueError."""
        # Spark holds an empty tuple as a list.
        if value is self.default or (self.default == () and isinstance(value, list) and not value):
            return self.default
        if self.convert is not None:
            value = self.convert(value)
        return value if self.hint is Any else check(self.hint, value, self.name, self.remedy)


def setting(default: Any, words: str, **more: Any) -> Any:
    """Declares a field of a section; `more` are attributes of `Setting`."""
    return field(default=default, metadata={"words": words, **more})


def settings_of(*sections: type[Section]) -> dict[str, Setting]:
    """Returns the settings of the sections by their names as Params."""
    return {found.name: found for section in sections for found in _settings(section)}


def _settings(section: Any) -> list[Setting]:
    hints, found = hints_of(section), []
    for each in fields(section):
        more = {"field": "" if section.ON_DRIVER else each.name, **each.metadata}
        more.setdefault("may_differ_on_resume", section.MAY_DIFFER_ON_RESUME)
        first, *rest = each.name.split("_")
        made = Setting(
            name=first + "".join(map(str.capitalize, rest)),
            hint=hints[each.name],
            default=each.default,
            group=section.GROUP,
            on_driver=section.ON_DRIVER,
            **more,
        )
        found.append(made)
    return found


def listed_name(
    setting: str, registry: Callable[[], Iterable[str]], declared: Callable[[], Iterable[str]]
) -> Callable[[Any], Any]:
    """Returns a converter that accepts names of a registry and names that other packages declare.

    Names are looked up when a value is checked: first in the registry, then among the declared names.
    """

    def convert(value: Any) -> Any:
        if isinstance(value, str) and value not in registry() and value not in declared():
            known = sorted({*registry(), *declared()})
            raise ValueError(f"{setting} must be one of {', '.join(known)}, got {value!r}")
        return value

    return convert


def split_callable(default: str) -> Callable[[Any], tuple[str, Any]]:
    """Returns a function that splits a value into a name, `default` for a callable, and the callable."""
    return lambda value: (value, None) if isinstance(value, str) else (default, value)


def name_or_callable(setting: str, known: Iterable[str]) -> Callable[[Any], Any]:
    """Returns a converter that accepts one of the names, or any callable."""

    def convert(value: Any) -> Any:
        if isinstance(value, str):
            check_name(setting, value, known)
        elif not callable(value):
            raise WrongTypeError(f"{setting} must be a name or a callable, got {type(value).__name__}")
        return value

    return convert
