"""Texts of error messages: unknown names with the nearest known name, and the cause of another error."""

from __future__ import annotations

from collections.abc import Iterable
from difflib import get_close_matches


def nearest(name: str, known: Iterable[str]) -> str:
    """Returns the hint "; did you mean 'x'?" for the known name most like `name`, or ""; ignores case."""
    by_folded = {candidate.casefold(): candidate for candidate in sorted(known)}
    near = get_close_matches(name.casefold(), by_folded, n=1)
    return f"; did you mean {by_folded[near[0]]!r}?" if near else ""


def check_name(kind: str, name: str, known: Iterable[str], otherwise: str = " or a callable") -> None:
    """Raises ValueError for a name outside `known`; `kind` is the Param, `otherwise` names alternatives."""
    names = sorted(known)
    if name not in names:
        raise ValueError(f"{kind} must be one of {names}{otherwise}, got {name!r}{nearest(name, names)}")


def first_line(error: BaseException) -> str:
    """Returns the first line of an error's text, because torch's and Spark's explanations fill pages."""
    lines = (line.strip().rstrip(" .;:") for line in str(error).splitlines())
    return next(filter(None, lines), type(error).__name__)
