"""Names that users write: unknown ones are refused, and the nearest known one is pointed out."""

from __future__ import annotations

from collections.abc import Iterable
from difflib import get_close_matches


def nearest(name: str, known: Iterable[str]) -> str:
    """The hint "; did you mean 'x'?" for the known name most like `name`, or nothing.

    Case does not count: "mseloss" is as near to "MSELoss" as can be.
    """
    by_folded = {candidate.casefold(): candidate for candidate in sorted(known)}
    near = get_close_matches(name.casefold(), by_folded, n=1)
    return f"; did you mean {by_folded[near[0]]!r}?" if near else ""


def check_name(kind: str, name: str, known: Iterable[str], otherwise: str = " or a callable") -> None:
    """Refuses a name outside `known`.

    Args:
        kind: What is named, as the user wrote it: the Param.
        otherwise: What may be given besides a name, with a leading space.

    Raises:
        ValueError: With the known names and the nearest.
    """
    names = sorted(known)
    if name not in names:
        raise ValueError(f"{kind} must be one of {names}{otherwise}, got {name!r}{nearest(name, names)}")
