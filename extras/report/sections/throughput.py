"""Rows per second in training, per epoch and between two recorded steps; how each rank spent its time."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import pairwise
from statistics import fmean, median
from typing import TYPE_CHECKING

from ringspark.extras.report.content import Block, Chart, Table, seconds
from ringspark.extras.report.drawing import BLUE, COLORS, GREEN, draw_svg, line, plain, whole_ticks
from ringspark.extras.report.facts import RunFacts

if TYPE_CHECKING:
    from matplotlib.figure import Figure

MOST_RANKS = 32

Shares = Mapping[int, Mapping[str, float]]


def rates_by_epoch(run: RunFacts) -> list[tuple[int, float]]:
    """Returns (epoch, rows per second); an epoch's time includes its validation."""
    return [(r.epoch, r.rows / r.seconds) for r in run.history if r.seconds > 0]


def rates_by_step(run: RunFacts) -> list[tuple[int, float]]:
    """Returns (step, rows per second since the previous recorded step)."""
    found = []
    for before, after in pairwise(run.steps):
        took = after.seconds - before.seconds
        if took > 0 and after.rows > before.rows:
            found.append((after.step, (after.rows - before.rows) / took))
    return found


def make(run: RunFacts) -> Sequence[Block]:
    by_epoch, by_step = rates_by_epoch(run), rates_by_step(run)
    if not by_epoch:
        return []
    slowest, fastest = (choose(by_epoch, key=lambda pair: pair[1]) for choose in (min, max))
    middle = median(rate for _, rate in by_epoch)
    ranks = run.config.num_workers if run.config is not None else 1
    rows = [
        ["slowest epoch", f"{slowest[0]:,}", f"{slowest[1]:,.0f}", f"{slowest[1] / ranks:,.0f}"],
        ["median epoch", "", f"{middle:,.0f}", f"{middle / ranks:,.0f}"],
        ["fastest epoch", f"{fastest[0]:,}", f"{fastest[1]:,.0f}", f"{fastest[1] / ranks:,.0f}"],
    ]
    took = sum(record.seconds for record in run.history)
    note = (
        f"The epochs took {seconds(took)}, including validation. All ranks take the same steps and share "
        f"each batch, so a rank's rate is its share of the total.{_describe_communication(run)}"
    )
    svg = draw_svg(lambda figure: _draw(figure, by_epoch, by_step), 2.8)
    return [
        Chart(svg, "Rows per second, all ranks together."),
        Table(["", "epoch", "rows/s", "rows/s per rank"], rows, note=note),
    ]


def _describe_communication(run: RunFacts) -> str:
    """Returns a sentence about the epochs in which communication was measured; "" if there are none."""
    costs = [r.cost for r in run.history if r.cost is not None and r.cost.communication_seconds is not None]
    total = sum(cost.communication_seconds or 0.0 for cost in costs)
    if not total:
        return ""
    parts = ((c.communication_seconds or 0.0) * (c.communication_hidden or 0.0) for c in costs)
    return (
        f" In {len(costs):,} epochs a rank communicated for {seconds(total)}, and "
        f"{sum(parts) / total:.0%} of that overlapped with computation."
    )


def _draw(
    figure: Figure, by_epoch: Sequence[tuple[int, float]], by_step: Sequence[tuple[int, float]]
) -> None:
    plots = [(by_epoch, "by epoch", "epoch", BLUE)]
    if len(by_step) > 1:
        plots.append((by_step, "between records of steps", "optimizer step", GREEN))
    grid = figure.subplots(1, len(plots), squeeze=False)
    for axes, (rates, title, x, color) in zip(grid.flat, plots, strict=True):
        axes.set(title=f"Rows/s {title}", xlabel=x)
        line(axes, [at for at, _ in rates], [rate for _, rate in rates], "rows/s", color)
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
