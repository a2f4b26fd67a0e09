"""Checks a value against an annotated type, and raises an error of one sentence.

pydantic does the check. Its own messages name internal types, so the message is made from the annotation:
`Annotated[int, Ge(1)]` gives "must be a whole number" and "must be at least 1". The first check takes a tenth
of a second longer, because it imports pydantic.
"""

from __future__ import annotations

import math
from array import array
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, is_dataclass
from functools import cache
from types import NoneType, UnionType
from typing import Annotated, Any, Literal, NamedTuple, Union, get_args, get_origin

from annotated_types import Ge, MinLen, Predicate

AtLeast1 = Annotated[int, Ge(1)]
NotNegative = Annotated[int, Ge(0)]
Finite = Predicate(math.isfinite)
Names = tuple[Annotated[str, MinLen(1)], ...]
"""One name or a list of names."""


@dataclass(frozen=True)
class Rule(Predicate):
    """A rule that no bound states; `words` complete "must ..."."""

    words: str = ""


class WrongTypeError(TypeError, ValueError):
    """A value of a wrong type: a TypeError for Spark's converters, a ValueError for pydantic's validators."""


# pydantic's error types for a value of the right type that is out of range.
_OUT_OF_RANGE = {"greater_than", "greater_than_equal", "less_than", "less_than_equal", "predicate_failed"}
_TYPE_RULES = {
    int: "a whole number",
    float: "a number",
    str: "a string",
    dict: "a dict",
    tuple: "a list of numbers",
}


def check(hint: Any, value: Any, subject: str, remedy: str = "") -> Any:
    """Returns the value converted to the type: a list becomes a tuple, and 2.0 becomes 2 for a whole number.

    Raises:
        WrongTypeError: The value has another type; "<subject> must be a number, got ...".
        ValueError: It is out of range (the message ends with `remedy`), or an option of it is wrong.
    """
    from pydantic import ValidationError

    ready = _prepare(hint, value)
    try:
        found = _adapter(hint).validate_python(ready, context=subject)
        if _is_number_of(ready, found):
            return found
        problems = []
    except ValidationError as error:
        problems = error.errors(include_url=False)
    own = [each["ctx"]["error"] for each in problems if each["type"] == "value_error"]
    # A class of options does not know the other members of its union, such as 'auto'.
    if own and (len(parts_of(hint)) == 1 or isinstance(ready, Mapping)):
        raise own[0]
    if any(each["type"] in _OUT_OF_RANGE for each in problems):
        raise ValueError(f"{subject} {range_rule(hint)}, got {value!r}{remedy and f'; {remedy}'}")
    if isinstance(ready, float) and ready.is_integer():
        return check(hint, int(ready), subject, remedy)
    raise WrongTypeError(f"{subject} must be {either(type_rules(hint) or ['None'])}, got {value!r}")


def range_rule(hint: Any) -> str:
    """Returns the rule of a type's range, such as "must be at least 1"; "" if every value is accepted."""
    rules = [rule for part in parts_of(hint) if part.ranges and (rule := _range(part))]
    return f"must {rules[0]}" if rules else ""


class Part(NamedTuple):
    """One of the types of a union, and its constraints."""

    kind: Any
    ranges: tuple[Any, ...]


def parts_of(hint: Any) -> list[Part]:
    """Returns the types of a union except None, each with its constraints."""
    origin, args = get_origin(hint), get_args(hint)
    if origin in (Union, UnionType):
        return [part for arg in args if arg is not NoneType for part in parts_of(arg)]
    if origin is Annotated:
        return [Part(part.kind, args[1:]) for part in parts_of(args[0])]
    return [Part(hint, ())]


def either(words: Iterable[str]) -> str:
    *first, last = words
    return f"{', '.join(first)} or {last}" if first else last


def type_rules(hint: Any) -> list[str]:
    """Returns the types of a hint in words, such as ["a whole number", "'epoch'"]."""
    return [word for part in parts_of(hint) for word in _words_of(part.kind)]


def _words_of(kind: Any) -> list[str]:
    if get_origin(kind) is Literal:
        return [repr(choice) for choice in get_args(kind)]
    if _is_names(kind):
        return ["a name or a list of names"]
    kind = get_origin(kind) or kind
    if kind is bool:
        return ["True", "False"]
    return [_TYPE_RULES.get(kind) or f"a {getattr(kind, '__name__', kind)}"]


def _is_names(kind: Any) -> bool:
    args = get_args(kind)
    return get_origin(kind) is tuple and parts_of(args[0])[0].kind is str


def _range(part: Part) -> str:
    bounds: dict[str, Any] = {}
    for each in part.ranges:
        if isinstance(each, Rule):
            return each.words
        for name in ("ge", "gt", "le", "lt"):
            if hasattr(each, name):
                bounds[name] = getattr(each, name)
    finite = " and finite" if Finite in part.ranges else ""
    match bounds:
        case {"ge": low, "le": high}:
            return f"be from {low} to {high}"
        case {"ge": low, "lt": high}:
            return f"be from {low} to below {high}"
        case {"gt": low, "le": high}:
            return f"be above {low} and at most {high}"
        case {"gt": low, "lt": high}:
            return f"lie between {low} and {high}"
        case {"gt": low}:
            return f"be above {low}{finite}"
        case {"ge": 0}:
            return f"be 0 or above{finite}" if finite else "not be negative"
        case {"ge": low}:
            return f"be at least {low}"
    return ""


def _is_number_of(given: Any, found: Any) -> bool:
    """Whether numbers were given as numbers: pydantic also takes True for 1, and objects with `__float__`."""
    if isinstance(found, tuple) and isinstance(given, tuple):
        return all(map(_is_number_of, given, found))
    if not isinstance(found, int | float):
        return True
    return isinstance(given, int | float) and isinstance(given, bool) == isinstance(found, bool)


def _prepare(hint: Any, value: Any) -> Any:
    kinds = [part.kind for part in parts_of(hint)]
    value = _plain(value, takes_lists=any(get_origin(kind) is tuple for kind in kinds))
    if isinstance(value, str) and any(map(_is_names, kinds)) and str not in kinds:
        return (value,)
    if isinstance(value, Mapping) and any(get_origin(kind) is dict for kind in kinds):
        return dict(value)
    return frozen(value)


def _plain(value: Any, takes_lists: bool) -> Any:
    """Converts NumPy's numbers and strings, which grids of values have, and vectors if a list is expected."""
    if isinstance(value, list | tuple):
        return [_plain(each, takes_lists) for each in value]
    if takes_lists and hasattr(value, "toArray"):
        value = value.toArray()  # of Spark's vectors
    if takes_lists and (isinstance(value, range | array) or getattr(value, "ndim", False)):
        return list(value) if isinstance(value, range) else value.tolist()
    is_scalar = type(value).__module__ == "numpy" and getattr(value, "ndim", True) == 0
    return value.item() if is_scalar and value.dtype.kind in "biufU" else value


def frozen(value: Any) -> Any:
    """Returns a list as a tuple, also within lists."""
    return tuple(map(frozen, value)) if isinstance(value, list | tuple) else value


def listed(value: Any) -> Any:
    """Returns a tuple as a list, also within tuples: the form in which Spark and JSON hold it."""
    return list(map(listed, value)) if isinstance(value, list | tuple) else value


@cache
def _adapter(hint: Any) -> Any:
    from pydantic import ConfigDict, TypeAdapter

    # A class of options has its own rules, and pydantic refuses others for it.
    rules = None if is_dataclass(hint) else ConfigDict(strict=True, arbitrary_types_allowed=True)
    return TypeAdapter(hint, config=rules)
