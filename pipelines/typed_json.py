"""Reads untrusted JSON into a dataclass; raises ValueError unless every field has its declared type.

A nested dataclass is read by its method `from_values` if it has one, otherwise like the outer dataclass.
"""

from __future__ import annotations

import json
import types
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import asdict, fields, is_dataclass
from functools import lru_cache
from typing import Any, ClassVar, Literal, NoReturn, TypeVar, Union, get_args, get_origin, get_type_hints

T = TypeVar("T")
J = TypeVar("J", bound="JsonText")


def parse(text: str | bytes, *, allow_nan: bool = False) -> Any:
    """Parses JSON, or raises ValueError; `allow_nan` accepts NaN and infinities."""
    try:
        return json.loads(text, parse_constant=None if allow_nan else _refuse_constant)
    except RecursionError:
        raise ValueError("it is nested too deeply") from None


def parse_object(text: str | bytes, *, allow_nan: bool = False) -> dict[str, Any]:
    value = parse(text, allow_nan=allow_nan)
    if not isinstance(value, dict):
        raise ValueError(f"an object is expected, got {_kind(value)}")
    return value


class OtherFormatError(ValueError):
    """Another version of ringspark wrote the file. The message says what to do."""


def versioned(text: str | bytes, known: int, *, allow_nan: bool = False) -> dict[str, Any]:
    """Parses a JSON object whose `format_version` must be `known`.

    Raises OtherFormatError if the version differs, and ValueError if the text is not such an object.
    """
    values = parse_object(text, allow_nan=allow_nan)
    if "format_version" not in values:
        raise ValueError("'format_version' is missing")
    version = values["format_version"]
    if type(version) is not int:
        raise ValueError(f"format_version must be a whole number, got {_kind(version)}")
    if version > known:
        raise OtherFormatError(
            f"its format is {version}, but this ringspark reads {known}; upgrade ringspark"
        )
    if version < known:
        raise OtherFormatError(
            f"its format is {version}, from before the first release, but this ringspark reads {known}; "
            "write it again, or read it with the ringspark that wrote it"
        )
    return values


def record(cls: type[T], values: object) -> T:
    """Creates an instance of the dataclass `cls` from a JSON object.

    Raises ValueError if a field is missing, unknown or not of the declared type; the message names the field.
    """
    if not isinstance(values, Mapping):
        raise ValueError(f"an object is expected, got {_kind(values)}")
    hints = _hints(cls)  # type: ignore[arg-type]
    known = [f.name for f in fields(cls) if f.init]  # type: ignore[arg-type]
    if unknown := sorted(str(name) for name in values.keys() - set(known)):
        raise ValueError(f"unknown entry {unknown[0][:40]!r}")
    # Even a field with a default must be there: the writer wrote every field.
    if missing := [name for name in known if name not in values]:
        raise ValueError(f"{missing[0]!r} is missing")
    return cls(**{name: fit(hints[name], values[name], name) for name in known})


class JsonText:
    """Base of dataclasses that are one JSON object in a file or a message."""

    allow_nan: ClassVar[bool] = False

    def to_json(self) -> str:
        return json.dumps(asdict(self))  # type: ignore[call-overload]

    @classmethod
    def from_json(cls: type[J], text: str | bytes) -> J:
        """Reads a result of `to_json`; raises ValueError for anything else."""
        return record(cls, parse_object(text, allow_nan=cls.allow_nan))


def fit(hint: Any, value: Any, name: str) -> Any:
    origin, args = get_origin(hint), get_args(hint)
    if hint is Any:
        return value
    if origin in (Union, types.UnionType):
        options = [option for option in args if option is not types.NoneType]
        if value is not None and len(options) == 1:
            return fit(options[0], value, name)
        for option in args:
            with suppress(ValueError):
                return fit(option, value, name)
    elif origin is Literal:
        if isinstance(value, str | int | None) and value in args:
            return value
    elif origin in (tuple, list) and isinstance(value, list | tuple):
        return _fit_items(hint, list(value), name)
    elif origin is dict and isinstance(value, Mapping):
        return {fit(args[0], key, name): fit(args[1], item, name) for key, item in value.items()}
    elif isinstance(hint, type) and origin is None:
        if _is(hint, value):
            return value
        if is_dataclass(hint) and isinstance(value, Mapping):
            read = getattr(hint, "from_values", None)
            return record(hint, value) if read is None else read(value)
    is_class = isinstance(hint, type) and not args
    expected = hint.__name__ if is_class else str(hint).replace("typing.", "")
    raise ValueError(f"{name!r} must be {expected}, got {_kind(value)}")


_hints = lru_cache(get_type_hints)


def _fit_items(hint: Any, value: list[Any], name: str) -> Any:
    origin, args = get_origin(hint), get_args(hint)
    if origin is tuple and not (len(args) == 2 and args[1] is Ellipsis):
        if len(args) != len(value):
            raise ValueError(f"{name!r} must have {len(args)} entries, got {len(value)}")
        return tuple(fit(arg, item, name) for arg, item in zip(args, value, strict=True))
    return origin(fit(args[0], item, name) for item in value)


def _is(hint: type, value: Any) -> bool:
    if hint in (int, float) and isinstance(value, bool):
        return False
    # Other languages may write 1 for 1.0.
    return isinstance(value, int | float) if hint is float else isinstance(value, hint)


def _kind(value: object) -> str:
    text = repr(value) if isinstance(value, str | int | float | None) else ""
    return text if 0 < len(text) <= 40 else type(value).__name__


def _refuse_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is not JSON")
