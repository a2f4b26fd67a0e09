"""Blocks of a report, which the template turns into HTML."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Text:
    """A paragraph; it is highlighted if `warns` is True."""

    text: str
    warns: bool = False


@dataclass(frozen=True)
class Cards:
    """A few pairs (name, value), each shown as a card."""

    entries: Sequence[tuple[str, str]]


@dataclass(frozen=True)
class Table:
    """A table of text.

    Attributes:
        words: Indexes of the columns that are left-aligned; all other columns are right-aligned.
        note: Text below the table, such as how to read it.
        marked: Indexes of the rows that are highlighted.
        most: Rows that the page shows; a sentence says how many others there are.
    """

    header: Sequence[str]
    rows: Sequence[Sequence[str]]
    words: frozenset[int] = frozenset({0})
    note: str = ""
    title: str = ""
    marked: frozenset[int] = frozenset()
    most: int = 40


@dataclass(frozen=True)
class Chart:
    """An SVG drawing with a caption that describes it."""

    svg: str
    caption: str


Block = Text | Cards | Table | Chart


def show(value: Any) -> str:
    """Formats a value for people, such as 12,345 or 0.01234 or 1.2e-07; None becomes ""."""
    if value is None:
        return ""
    if isinstance(value, bool) or not isinstance(value, int | float):
        return str(value)
    if isinstance(value, int):
        return f"{value:,}"
    if not math.isfinite(value):
        return "NaN" if math.isnan(value) else ("infinite" if value > 0 else "-infinite")
    if value == 0:
        return "0"
    if 1e-4 <= abs(value) < 1e5:
        digits = max(0, 3 - math.floor(math.log10(abs(value))))
        return f"{value:,.{digits}f}"
    return f"{value:.3e}"


def seconds(value: float) -> str:
    """Formats a time, such as "4.21 s" or "1 h 02 min"."""
    if value < 60:
        return f"{value:.2f} s" if value < 10 else f"{value:.1f} s"
    minutes = round(value / 60)
    if value < 3600:
        return f"{int(value // 60)} min {int(value % 60):02d} s"
    return f"{minutes // 60} h {minutes % 60:02d} min"


def first_and_last(count: int, most: int) -> list[int]:
    """Returns indexes of at most `most` of `count` items: a fifth from the start, the rest from the end."""
    if count <= most:
        return list(range(count))
    first = most // 5
    return [*range(first), *range(count - (most - first), count)]


def shorten(text: str, most: int = 120) -> str:
    return text if len(text) <= most else f"{text[: most - 3]}..."
