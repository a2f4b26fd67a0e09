"""The base class of settings that have several options, and the ranges of values.

A subclass of `Options` defines the value of a Param, a section of `TrainConfig` and of a job file, and a
table of docs/settings.md. Nothing here imports torch or Spark.
"""

from __future__ import annotations

import inspect
import math
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import MISSING, dataclass, field, fields
from functools import lru_cache
from types import NoneType, UnionType
from typing import Any, ClassVar, Literal, TypeVar, Union, get_args, get_origin, get_type_hints

from ringspark.estimators.names import nearest

T = TypeVar("T")
O = TypeVar("O", bound="Options")  # noqa: E741


@dataclass(frozen=True)
class ValueRange:
    """The values that a setting accepts.

    Attributes:
        holds: Returns whether a value of the right type is accepted.
        rule: Returns the predicate of the error's sentence, "must be ...".
        remedy: The user's remedy, if the rule does not contain it.
        choices: All accepted values, if they are a fixed list of words.
    """

    holds: Callable[[Any], bool]
    rule: Callable[[], str]
    remedy: str = ""
    choices: tuple[str, ...] = ()


def at_least(least: int, unit: str = "", remedy: str = "") -> ValueRange:
    rule = f"must be at least {least}{unit and ' '}{unit}"
    return ValueRange(lambda value: bool(value >= least), lambda: rule, remedy and f"; {remedy}")


def not_negative() -> ValueRange:
    return ValueRange(lambda value: bool(value >= 0), lambda: "must not be negative")


def above_0(remedy: str = "") -> ValueRange:
    return ValueRange(lambda value: bool(value > 0), lambda: "must be above 0", remedy and f"; {remedy}")


def above_0_and_finite() -> ValueRange:
    return ValueRange(lambda value: 0 < value < math.inf, lambda: "must be above 0 and finite")


def finite_from_0(remedy: str) -> ValueRange:
    return ValueRange(
        lambda value: 0 <= value < math.inf, lambda: "must be 0 or above and finite", f"; {remedy}"
    )


def above_0_to_1() -> ValueRange:
    return ValueRange(lambda value: 0 < value <= 1, lambda: "must be above 0 and at most 1")


def from_0_to_1() -> ValueRange:
    return ValueRange(lambda value: 0 <= value <= 1, lambda: "must be from 0 to 1")


def from_0_below_1() -> ValueRange:
    return ValueRange(lambda value: 0 <= value < 1, lambda: "must be from 0 to below 1")


def one_of(choices: Sequence[str]) -> ValueRange:
    rule = f"must be {_either(map(repr, choices))}"
    return ValueRange(lambda value: value in choices, lambda: rule, choices=tuple(choices))


def listed(registry: Callable[[], Iterable[str]], declared: Callable[[], Iterable[str]]) -> ValueRange:
    """Returns the range of a registry's names and of the names that other packages declare.

    Names are looked up when a value is checked: first in the registry, then among the declared names.
    """
    return ValueRange(
        lambda value: value in registry() or value in declared(),
        lambda: f"must be one of {', '.join(sorted({*registry(), *declared()}))}",
    )


def option(allowed: ValueRange, default: Any = MISSING) -> Any:
    """Declares a field of `Options` with its accepted values; a field without a default is required."""
    return field(default=default, metadata={"allowed": allowed})


class _Signature:
    """Makes a class's signature from its `__init__`, because its `__new__` does not name the options."""

    def __get__(self, instance: object, owner: type) -> inspect.Signature:
        made = inspect.signature(owner.__init__)  # type: ignore[misc]
        return made.replace(parameters=list(made.parameters.values())[1:])


class _AnyCase(type):
    """Lets a constructor take the names of a job file, such as maxGradNorm for max_grad_norm."""

    def __call__(cls, *args: Any, **options: Any) -> Any:
        return super().__call__(*args, **{_to_snake_case(name): value for name, value in options.items()})


def _to_snake_case(name: str) -> str:
    return re.sub(r"(?<=[a-z])([A-Z])", lambda match: f"_{match[1].lower()}", name)


@dataclass(frozen=True, kw_only=True)
class Options(metaclass=_AnyCase):
    """The options of one setting.

    A class with variants, such as `Sync`, has no instances itself. A variant's dict has its name as "name".

    Attributes:
        NAME: Name of a variant in dicts and files; by default its class name in lower case.
        SHORTHAND: Name of the option that a plain value sets, such as "stages" for pipeline=2; "" for none.
    """

    NAME: ClassVar[str] = ""
    SHORTHAND: ClassVar[str] = ""
    # What `help` and the API pages show.
    __signature__: ClassVar[_Signature] = _Signature()

    def __init_subclass__(cls) -> None:
        if "NAME" not in cls.__dict__:
            cls.NAME = cls.__name__.lower()
        # `dataclass` keeps a method that the class has itself.
        type.__setattr__(cls, "__repr__", Options.__repr__)

    def __new__(cls, *_: Any, **options: Any) -> Options:
        names = [each.name for each in fields(cls)]
        if unknown := [name for name in options if name not in names]:
            known = ", ".join(names) or "no options"
            raise TypeError(f"{cls.__name__} takes {known}, got {unknown[0]!r}{nearest(unknown[0], names)}")
        return super().__new__(cls)

    def __post_init__(self) -> None:
        hints = _hints(type(self))
        for each in fields(self):
            subject = f"{type(self).__name__}'s {each.name}"
            value = _fit(hints[each.name], getattr(self, each.name), subject)
            allowed = each.metadata.get("allowed")
            if isinstance(value, int | float) and allowed is not None and not allowed.holds(value):
                raise ValueError(f"{subject} {allowed.rule()}, got {value!r}{allowed.remedy}")
            object.__setattr__(self, each.name, value)

    @classmethod
    def variants(cls) -> dict[str, type[Options]]:
        """Returns the variants of a setting by name; none for a class without variants."""
        found: dict[str, type[Options]] = {}
        for variant in cls.__subclasses__():
            found |= variant.variants() or {variant.NAME: variant}
        return found

    @classmethod
    def of(cls: type[O], value: Any, subject: str = "") -> O:
        """Converts a dict of options, the name of a variant, or the value of `SHORTHAND`.

        `subject` is the setting, for the errors.
        """
        variants = cls.variants()
        if isinstance(value, cls) and not type(value).variants():
            return value
        subject = subject or cls.__name__
        if variants and isinstance(value, str):
            value = {"name": value}
        if cls.SHORTHAND and value is not None and not isinstance(value, Mapping | Options):
            hint = _hints(cls)[cls.SHORTHAND]
            if _convert(hint, value, subject) is _MISMATCH:
                known = [*_type_rules(hint), cls.__name__]
                raise TypeError(
                    f"{subject} must be {_either(known)}, or a dict of its options, got {value!r}"
                )
            value = {cls.SHORTHAND: value}
        if not isinstance(value, Mapping):
            known = [variant.__name__ for variant in variants.values()] or [cls.__name__]
            raise TypeError(f"{subject} must be {_either(known)}, or a dict of its options, got {value!r}")
        given = dict(value)
        made: type[Any] = cls
        if variants:
            name = given.pop("name", None)
            key = name.replace("_", "").lower() if isinstance(name, str) else ""
            if key not in variants:
                hint = nearest(str(name), variants)
                raise ValueError(f"{subject} must be one of {', '.join(variants)}, got {name!r}{hint}")
            made = variants[key]
        elif Options not in cls.__bases__ and given.get("name") == cls.NAME:
            del given["name"]
        names = [each.name for each in fields(made)]
        found = {}
        for key, item in given.items():
            # Job files and saved stages of earlier versions have camelCase.
            name = _to_snake_case(str(key))
            if name not in names:
                options = ", ".join(names) or "no options"
                raise ValueError(f"{made.__name__} takes {options}, got {key!r}{nearest(name, names)}")
            found[name] = item
        missing = [each.name for each in fields(made) if each.default is MISSING and each.name not in found]
        if missing:
            raise ValueError(f"{made.__name__} needs {missing[0]!r}; it takes {', '.join(names)}")
        return made(**found)  # type: ignore[no-any-return]

    @classmethod
    def from_values(cls: type[O], values: Mapping[str, Any]) -> O:
        """Reads a result of `to_values`, also of an earlier version; raises ValueError if it is damaged."""
        try:
            return cls.of(values)
        except TypeError as error:
            raise ValueError(str(error)) from error

    def to_values(self) -> dict[str, Any]:
        """Returns all options as plain data, with the name of a variant."""
        is_variant = Options not in type(self).__bases__
        values = {each.name: _plain(getattr(self, each.name)) for each in fields(self)}
        return ({"name": self.NAME} if is_variant else {}) | values

    def __repr__(self) -> str:
        """Returns the constructor's call, without options at their defaults."""
        given = [f"{f.name}={v!r}" for f in fields(self) if (v := getattr(self, f.name)) != f.default]
        return f"{type(self).__name__}({', '.join(given)})"


@lru_cache
def _hints(cls: Any) -> dict[str, Any]:
    return get_type_hints(cls)


def _plain(value: Any) -> Any:
    if isinstance(value, Options):
        return value.to_values()
    return list(value) if isinstance(value, tuple) else value


def _either(words: Iterable[str]) -> str:
    *first, last = words
    return f"{', '.join(first)} or {last}" if first else last


_MISMATCH = object()
_TYPE_RULES = {bool: "True or False", int: "a whole number", float: "a number", str: "a text"}


def _fit(hint: Any, value: Any, subject: str) -> Any:
    if type(value).__module__ == "numpy" and hasattr(value, "item"):
        value = value.item()  # grids of values are often made by NumPy
    found = _convert(hint, value, subject)
    if found is _MISMATCH:
        raise ValueError(f"{subject} must be {_either(_type_rules(hint))}, got {value!r}")
    return found


def _convert(hint: Any, value: Any, subject: str) -> Any:
    origin, args = get_origin(hint), get_args(hint)
    if origin in (Union, UnionType):
        if value is None:
            return None if NoneType in args else _MISMATCH
        found = (_convert(arg, value, subject) for arg in args if arg is not NoneType)
        return next((each for each in found if each is not _MISMATCH), _MISMATCH)
    if origin is Literal:
        is_choice = isinstance(value, str | int) and not isinstance(value, bool) and value in args
        return value if is_choice else _MISMATCH
    if origin is tuple:
        names = [value] if isinstance(value, str) else value
        is_list = isinstance(names, list | tuple) and all(isinstance(name, str) and name for name in names)
        return tuple(names) if is_list else _MISMATCH
    if origin is dict:
        return dict(value) if isinstance(value, Mapping) else _MISMATCH
    if issubclass(hint, Options):
        return hint.of(value, subject)
    if hint is float:
        is_number = isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)
        return float(value) if is_number else _MISMATCH
    return value if type(value) is hint else _MISMATCH


def _type_rules(hint: Any) -> list[str]:
    origin, args = get_origin(hint), get_args(hint)
    if origin in (Union, UnionType):
        return [rule for arg in args if arg is not NoneType for rule in _type_rules(arg)]
    if origin is Literal:
        return [repr(choice) for choice in args]
    if origin in (tuple, dict):
        return ["a name or a list of names" if origin is tuple else "a dict"]
    return [_TYPE_RULES[hint]]
