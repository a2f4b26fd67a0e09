"""Parses sizes in Spark's notation ("4g", "512m"), and shows sizes to people."""

from __future__ import annotations

import re

_UNITS = {"": 1, "b": 1, "k": 1 << 10, "m": 1 << 20, "g": 1 << 30, "t": 1 << 40, "p": 1 << 50}
_NAMES = ("B", "KiB", "MiB", "GiB", "TiB", "PiB")
_SIZE = re.compile(r"\s*(\d+(?:\.\d+)?)\s*([kmgtp]?)(?:i?b)?\s*", re.IGNORECASE)


def parse_bytes(value: int | str, name: str = "budget") -> int:
    """Parses a number of bytes: an int, or a string such as "4g" with Spark's units of 1024.

    Raises TypeError for another type, ValueError for a wrong string or a size below 1.
    """
    refusal = f"{name} must be bytes as an int or a string such as '4g', got {value!r}"
    if isinstance(value, bool) or not isinstance(value, int | str):
        raise TypeError(refusal)
    if isinstance(value, str):
        found = _SIZE.fullmatch(value)
        if found is None:
            raise ValueError(refusal)
        count = int(float(found[1]) * _UNITS[found[2].lower()])
    else:
        count = value
    if count < 1:
        raise ValueError(f"{name} must be above 0 bytes, got {value!r}")
    return count


def show_bytes(count: float) -> str:
    """Returns a text such as "3.2 GiB"."""
    size, unit = float(count), 0
    while size >= 1024 and unit < len(_NAMES) - 1:
        size, unit = size / 1024, unit + 1
    return f"{size:.0f} B" if unit == 0 else f"{size:.1f} {_NAMES[unit]}"
