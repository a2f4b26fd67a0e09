"""Text tables and units of the plans."""

from __future__ import annotations

from collections.abc import Sequence

from ringspark.extras.planning.exchange_time import Link


def align_table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    lines = [header, *rows]
    widths = [max(len(line[i]) for line in lines) for i in range(len(header))]
    return "\n".join(
        "  ".join(text.rjust(width) for text, width in zip(line, widths, strict=True)) for line in lines
    )


def describe_link(link: Link) -> str:
    rate = f"plus its bytes at {1e-6 / link.beta:,.0f} MB/s" if link.beta else "at any size"
    return f"a message takes {show_seconds(link.alpha)} {rate}"


def show_seconds(seconds: float) -> str:
    for unit, size in (("s", 1.0), ("ms", 1e-3), ("us", 1e-6)):
        if seconds >= size:
            return f"{seconds / size:.3g} {unit}"
    return f"{seconds * 1e9:.3g} ns" if seconds else "0"
