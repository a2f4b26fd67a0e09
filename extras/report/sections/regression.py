"""Results of a regression on held-out rows: predictions against labels, and residuals."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np

from ringspark.extras.report.content import Block, Cards, Chart, Facts, Section, Text, show
from ringspark.extras.report.drawing import BLUE, GRAY, ORANGE, draw_svg
from ringspark.extras.report.held_out.findings import NumberFindings

if TYPE_CHECKING:
    from matplotlib.figure import Figure


def _make(facts: Facts) -> Sequence[Block]:
    found = facts.held_out.numbers if facts.held_out is not None else None
    if found is None:
        return []
    if not found.numbers:
        return [Text("None of the held-out rows has a label and a prediction.")]
    cards = [
        ("held-out numbers", show(found.numbers)),
        ("R2", show(found.r2)),
        ("RMSE", show(found.rmse)),
        ("MAE", show(found.mae)),
        ("mean residual", show(found.bias)),
    ]
    note = f" {found.skipped:,} rows without a prediction are left out." if found.skipped else ""
    shown = f"all {found.numbers:,} numbers"
    if len(found.sample) < found.numbers:
        shown = f"{len(found.sample):,} of {found.numbers:,} numbers, drawn at random"
    caption = (
        f"Left: {shown}, and the mean label of all numbers in bins of the prediction. Right: all residuals, "
        f"prediction minus label.{note}"
    )
    return [Cards(cards), Chart(draw_svg(lambda figure: _draw(figure, found), 3.8), caption)]


def _draw(figure: Figure, found: NumberFindings) -> None:
    left, right = figure.subplots(1, 2)
    predicted, true = found.sample.T
    left.plot(predicted, true, ".", markersize=3, alpha=0.4, color=BLUE, label="sample")
    known = np.isfinite(found.bin_true)
    means = found.bin_predicted[known], found.bin_true[known]
    left.plot(*means, "o-", markersize=4, color=ORANGE, label="mean")
    ends = [min(predicted.min(), true.min()), max(predicted.max(), true.max())]
    left.plot(ends, ends, ":", color=GRAY, label="perfect")
    left.set(title="Label against prediction", xlabel="prediction", ylabel="label")
    left.legend()
    widths = np.diff(found.residual_edges)
    right.bar(found.residual_edges[:-1], found.residual_counts, width=widths, align="edge", color=BLUE)
    right.axvline(0, color=GRAY, linestyle=":")
    right.set(title="Residuals", xlabel="prediction minus label", ylabel="numbers")


SECTION = Section(name="numbers", title="Held-out rows: predictions", make=_make)
