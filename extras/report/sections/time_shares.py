"""How each rank spent its time. The section is omitted without a timeline."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from statistics import fmean
from typing import TYPE_CHECKING

from ringspark.extras.report.content import Block, Chart, Facts, Section, Table
from ringspark.extras.report.drawing import COLORS, draw_svg, plain

if TYPE_CHECKING:
    from matplotlib.figure import Figure

MOST_RANKS = 32

Shares = Mapping[int, Mapping[str, float]]


def _make(facts: Facts) -> Sequence[Block]:
    shares = facts.run.time_shares
    if not shares:
        return []
    by_kind = {
        kind: [of_rank.get(kind, 0.0) for of_rank in shares.values()]
        for kind in sorted({kind for of_rank in shares.values() for kind in of_rank})
    }
    kinds = sorted(by_kind, key=lambda kind: -fmean(by_kind[kind]))
    shown = sorted(shares)[:MOST_RANKS]
    left_out = len(shares) - len(shown)
    note = f"The first {len(shown)} of {len(shares):,} ranks." if left_out else ""
    rows = [
        [kind, *(f"{100 * combine(by_kind[kind]):.1f} %" for combine in (fmean, min, max))] for kind in kinds
    ]
    svg = draw_svg(lambda figure: _draw(figure, shares, shown, kinds), 1.3 + 0.28 * len(shown))
    return [
        Chart(svg, f"Share of each rank's time by kind of work. {note}".strip()),
        Table(["kind of work", "mean over ranks", "min", "max"], rows),
    ]


def _draw(figure: Figure, shares: Shares, ranks: Sequence[int], kinds: Sequence[str]) -> None:
    axes = figure.subplots()
    names, left = [f"rank {rank}" for rank in ranks], [0.0] * len(ranks)
    for number, kind in enumerate(kinds):
        widths = [100 * shares[rank].get(kind, 0.0) for rank in ranks]
        axes.barh(names, widths, left=left, label=plain(kind), color=COLORS[number % len(COLORS)])
        left = [a + b for a, b in zip(left, widths, strict=True)]
    axes.invert_yaxis()
    axes.set(xlabel="% of the rank's time", xlim=(0, max(100.0, *left)))
    axes.grid(axis="y", visible=False)
    figure.legend(loc="outside upper center", ncols=5)


SECTION = Section(name="time", title="Share of time", make=_make)
