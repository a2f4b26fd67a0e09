"""Sizes as people read them, and as Spark writes them ("4g", "512m")."""

from __future__ import annotations

from ringspark.estimators.training.settings.byte_sizes import parse_bytes

_NAMES = ("B", "KiB", "MiB", "GiB", "TiB", "PiB")


def show_bytes(count: float) -> str:
    """Such as "3.2 GiB"."""
    size, unit = float(count), 0
    while size >= 1024 and unit < len(_NAMES) - 1:
        size, unit = size / 1024, unit + 1
    return f"{size:.0f} B" if unit == 0 else f"{size:.1f} {_NAMES[unit]}"


__all__ = ["parse_bytes", "show_bytes"]
