"""Importance of the features, measured on a sample of the held-out rows."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from ringspark.extras.report.content import Block, Chart, Facts, Section, Table, show
from ringspark.extras.report.drawing import BLUE, GRAY, draw_svg, plain
from ringspark.extras.report.held_out.findings import Attribution

if TYPE_CHECKING:
    from matplotlib.figure import Figure

MOST_FEATURES = 30
TITLES = {"permutation": "Permutation importance", "integrated_gradients": "Integrated gradients"}


def _make(facts: Facts) -> Sequence[Block]:
    found = facts.held_out.attribution if facts.held_out is not None else None
    if found is None or not found.features:
        return []
    order = sorted(range(len(found.features)), key=lambda i: -found.values[i])
    shown = order[:MOST_FEATURES]
    cut = f" The {MOST_FEATURES} largest of {len(order):,} features." if len(order) > len(shown) else ""
    caption = f"{TITLES[found.method]}: {found.unit}, over {found.rows:,} rows.{cut} {found.note}".rstrip()
    header = ["feature", found.unit, *(["standard deviation"] if found.spread else [])]
    rows = [
        [found.features[i], show(found.values[i]), *([show(found.spread[i])] if found.spread else [])]
        for i in shown
    ]
    height = 0.9 + 0.24 * len(shown)
    return [Chart(draw_svg(lambda figure: _draw(figure, found, shown), height), caption), Table(header, rows)]


def _draw(figure: Figure, found: Attribution, shown: Sequence[int]) -> None:
    axes = figure.subplots()
    places = range(len(shown))
    errors = [found.spread[i] for i in shown] if found.spread else None
    axes.barh(places, [found.values[i] for i in shown], xerr=errors, color=BLUE, ecolor=GRAY, height=0.7)
    axes.set_yticks(places, [plain(found.features[i]) for i in shown])
    axes.invert_yaxis()
    axes.axvline(0, color=GRAY, linewidth=0.8)
    axes.grid(axis="y", visible=False)
    axes.set_xlabel(found.unit)


SECTION = Section(name="features", title="Features", make=_make)
