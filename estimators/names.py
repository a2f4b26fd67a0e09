"""Checks names that users write: refuses an unknown one and points out the nearest known one."""

from __future__ import annotations

from collections.abc import Iterable
from difflib import get_close_matches


def nearest(name: str, known: Iterable[str]) -> str:
    """Returns the hint "; did you mean 'x'?" for the known name most like `name`, or an empty string.

    Case does not count: "mseloss" and "MSELoss" are equal here.
    """
    by_folded = {candidate.casefold(): candidate for candidate in sorted(known)}
    near = get_close_matches(name.casefold(), by_folded, n=1)
    return f"; did you mean {by_folded[near[0]]!r}?" if near else ""


def check_name(kind: str, name: str, known: Iterable[str], otherwise: str = " or a callable") -> None:
    """Refuses a name outside `known`.

    Args:
        kind: The setting that holds the name, as the user wrote it: the Param.
        otherwise: Text, with a leading space, on what may be given besides a name.

    Raises:
        ValueError: The name is unknown; the message has the known names and the nearest one.
    """
    names = sorted(known)
    if name not in names:
        raise ValueError(f"{kind} must be one of {names}{otherwise}, got {name!r}{nearest(name, names)}")
