"""Converters of settings whose value is a name in a registry, or a user's callable."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

from ringspark.estimators.names import check_name
from ringspark.estimators.options.checked import WrongTypeError


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
