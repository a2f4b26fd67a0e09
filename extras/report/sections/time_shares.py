"""Each rank's time by kind of work; omitted without a timeline."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from ringspark.extras.report.content import Block, Chart, Section, Table
from ringspark.extras.report.drawing import COLORS, draw_svg, plain
from ringspark.extras.report.facts import Facts

if TYPE_CHECKING:
    from matplotlib.figure import Figure

MOST_RANKS = 32

Shares = Mapping[int, Mapping[str, float]]


def _make(facts: Facts) -> Sequence[Block]:
    shares = facts.run.time_shares
    if not shares:
        return []
    kinds = sorted({kind for of_rank in shares.values() for kind in of_rank}, key=lambda k: -_mean(shares, k))
    shown = sorted(shares)[:MOST_RANKS]
    left_out = len(shares) - len(shown)
    note = f"The first {len(shown)} of {len(shares):,} ranks." if left_out else ""
    rows = [
        [kind, *(f"{100 * value:.1f} %" for value in (_mean(shares, kind), *_ends(shares, kind)))]
        for kind in kinds
    ]
    return [
        Chart(
            draw_svg(lambda figure: _draw(figure, shares, shown, kinds), 1.3 + 0.28 * len(shown)),
            f"Share of each rank's time by kind of work. {note}".strip(),
        ),
        Table(["kind of work", "mean of ranks", "least", "most"], rows),
    ]


def _mean(shares: Shares, kind: str) -> float:
    return sum(of_rank.get(kind, 0.0) for of_rank in shares.values()) / len(shares)


def _ends(shares: Shares, kind: str) -> tuple[float, float]:
    values = [of_rank.get(kind, 0.0) for of_rank in shares.values()]
    return min(values), max(values)


def _draw(figure: Figure, shares: Shares, ranks: Sequence[int], kinds: Sequence[str]) -> None:
    axes = figure.subplots()
    names, left = [f"rank {rank}" for rank in ranks], [0.0] * len(ranks)
    for number, kind in enumerate(kinds):
        widths = [100 * shares[rank].get(kind, 0.0) for rank in ranks]
        axes.barh(names, widths, left=left, label=plain(kind), color=COLORS[number % len(COLORS)])
        left = [a + b for a, b in zip(left, widths, strict=True)]
    axes.invert_yaxis()
    axes.set(xlabel="% of its time", xlim=(0, max(100.0, *left)))
    axes.grid(axis="y", visible=False)
    figure.legend(loc="outside upper center", ncols=5)


SECTION = Section(name="time", title="Share of time", make=_make)
