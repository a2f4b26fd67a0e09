"""Rows per second in each epoch, and how each rank spent its time."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from statistics import fmean, median
from typing import TYPE_CHECKING

from ringspark.extras.report.content import Block, Chart, Table, seconds
from ringspark.extras.report.drawing import BLUE, COLORS, draw_svg, line, plain, whole_ticks
from ringspark.extras.report.facts import RunFacts

if TYPE_CHECKING:
    from matplotlib.figure import Figure

MOST_RANKS = 32

Shares = Mapping[int, Mapping[str, float]]


def make(run: RunFacts) -> Sequence[Block]:
    rates = [(r.epoch, r.rows / r.seconds) for r in run.history if r.seconds > 0]
    if not rates:
        return []
    slowest, fastest = (choose(rates, key=lambda pair: pair[1]) for choose in (min, max))
    middle = median(rate for _, rate in rates)
    ranks = run.config.num_workers if run.config is not None else 1
    rows = [
        [name, epoch, f"{rate:,.0f}", f"{rate / ranks:,.0f}"]
        for name, epoch, rate in (
            ("slowest epoch", f"{slowest[0]:,}", slowest[1]),
            ("median epoch", "", middle),
            ("fastest epoch", f"{fastest[0]:,}", fastest[1]),
        )
    ]
    took = sum(record.seconds for record in run.history)
    note = (
        f"The epochs took {seconds(took)}, including validation. All ranks take the same steps and share "
        "each batch, so a rank's rate is its share of the total."
    )
    return [
        Chart(draw_svg(lambda figure: _draw(figure, rates), 2.8), "Rows per second, all ranks together."),
        Table(["", "epoch", "rows/s", "rows/s per rank"], rows, note=note),
    ]


def _draw(figure: Figure, rates: Sequence[tuple[int, float]]) -> None:
    axes = figure.subplots()
    axes.set(title="Rows/s by epoch", xlabel="epoch")
    line(axes, [epoch for epoch, _ in rates], [rate for _, rate in rates], "rows/s", BLUE)
    whole_ticks(axes)
    axes.set_ylim(bottom=0)
    axes.yaxis.set_major_formatter(lambda value, _: f"{value:,.0f}")


def make_time_shares(run: RunFacts) -> Sequence[Block]:
    shares = run.time_shares
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
    svg = draw_svg(lambda figure: _draw_shares(figure, shares, shown, kinds), 1.3 + 0.28 * len(shown))
    return [
        Chart(svg, f"Share of each rank's time by kind of work. {note}".strip()),
        Table(["kind of work", "mean over ranks", "min", "max"], rows),
    ]


def _draw_shares(figure: Figure, shares: Shares, ranks: Sequence[int], kinds: Sequence[str]) -> None:
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
