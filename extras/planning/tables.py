"""Units of the plans."""

from __future__ import annotations

from ringspark.extras.planning.exchange_time import Link


def describe_link(link: Link) -> str:
    rate = f"plus its bytes at {1e-6 / link.beta:,.0f} MB/s" if link.beta else "at any size"
    return f"a message takes {show_seconds(link.alpha)} {rate}"


def show_seconds(seconds: float) -> str:
    for unit, size in (("s", 1.0), ("ms", 1e-3), ("us", 1e-6)):
        if seconds >= size:
            return f"{seconds / size:.3g} {unit}"
    return f"{seconds * 1e9:.3g} ns" if seconds else "0"
