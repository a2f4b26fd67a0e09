"""Argument checks of networks."""

from __future__ import annotations

from collections.abc import Iterable
from difflib import get_close_matches


def check_sizes(**sizes: int) -> None:
    for name, size in sizes.items():
        if size < 1:
            raise ValueError(f"{name} must be at least 1, got {size}")


def check_dropout(name: str, probability: float) -> None:
    if not 0.0 <= probability < 1.0:
        raise ValueError(f"{name} must be at least 0 and below 1, got {probability}")


def check_choice(name: str, value: object, known: Iterable[str]) -> None:
    known = list(known)
    if value not in known:
        raise ValueError(f"{name} must be one of {', '.join(known)}, got {value!r}{suggest(value, known)}")


def suggest(name: object, known: Iterable[str]) -> str:
    """Returns "; did you mean ...?" with the known name nearest to `name`, or "" if none is near."""
    near = get_close_matches(str(name), known, n=1)
    return f"; did you mean {near[0]!r}?" if near else ""
