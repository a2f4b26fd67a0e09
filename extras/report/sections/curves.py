"""Losses, metrics and learning rate over epochs and steps."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING

from ringspark.extras.report.content import (
    Block,
    Chart,
    Table,
    Text,
    first_and_last,
    seconds,
    show,
)
from ringspark.extras.report.drawing import (
    BLUE,
    GRAY,
    GREEN,
    MOST_POINTS,
    ORANGE,
    draw_svg,
    line,
    maybe_log,
    plain,
    whole_ticks,
)
from ringspark.extras.report.facts import RunFacts
from ringspark.extras.report.sections.headline import entries_of

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

MOST_METRICS = 12
MOST_EPOCHS = 15


def make(run: RunFacts) -> Sequence[Block]:
    blocks: list[Block] = []
    if run.history:
        caption = (
            "Mean loss per row over all ranks. The training loss is averaged while the weights change. The "
            "validation loss is measured at the end of the epoch."
        )
        if (count := len(run.history)) > MOST_POINTS:
            caption += f" {count:,} epochs are drawn as {MOST_POINTS} points, each a mean of neighbours."
        blocks.append(Chart(draw_svg(lambda figure: draw_losses(figure, run), 3.4), caption))
    if run.steps:
        count = len(run.steps)
        thinned = f"; {count:,} records are drawn as {MOST_POINTS} points" if count > MOST_POINTS else ""
        caption = f"Mean loss over all ranks since the previous record{thinned}."
        blocks.append(Chart(draw_svg(lambda figure: _draw_steps(figure, run), 2.9), caption))
    losses = ("train_loss", "validation_loss")
    # The same metric of both splits is one name.
    names = list(dict.fromkeys(n.partition("_")[2] for n in entries_of(run) if n not in losses))
    if names:
        shown = names[:MOST_METRICS]
        rows = -(-len(shown) // 3)
        more = f"; {len(names) - len(shown):,} more are not shown" if len(names) > len(shown) else ""
        caption = f"Metrics by epoch, for the training rows and the validation rows{more}."
        blocks.append(Chart(draw_svg(lambda figure: _draw_metrics(figure, run, shown), 2.4 * rows), caption))
    blocks.extend(Text(sentence, warns=True) for sentence in _gaps(run))
    if run.history:
        blocks.append(_table(run))
    return blocks


def draw_losses(figure: Figure, run: RunFacts) -> None:
    left, right = figure.subplots(1, 2, width_ratios=[2, 1])
    epochs = [record.epoch for record in run.history]
    left.set(title="Loss by epoch", xlabel="epoch", ylabel="mean per row")
    losses = [record.value("train_loss") for record in run.history]
    if any(record.train_loss is not None for record in run.history):  # a private training records none
        line(left, epochs, losses, "training", BLUE)
    held_out = [record.value("validation_loss") for record in run.history]
    if any(record.validation_loss is not None for record in run.history):
        line(left, epochs, held_out, "validation", ORANGE)
    _finish(left, [*losses, *held_out])
    if run.outcome is not None and 0 < run.outcome.model_epoch < len(run.history):
        left.axvline(run.outcome.model_epoch, color=GRAY, linestyle=":", label="the model's epoch")
    if left.lines:
        left.legend()
    rates = [(r.step, r.learning_rate) for r in run.steps]
    right.set(title="Learning rate", xlabel="step" if rates else "epoch")
    rates = rates or [(r.epoch, r.learning_rate) for r in run.history]
    line(right, [x for x, _ in rates], [rate for _, rate in rates], "learning rate", GREEN)
    whole_ticks(right)
    right.set_ylim(bottom=0)


def _draw_steps(figure: Figure, run: RunFacts) -> None:
    axes = figure.subplots()
    axes.set(title="Training loss by step", xlabel="optimizer step", ylabel="mean per row")
    losses = [record.train_loss for record in run.steps]
    line(axes, [record.step for record in run.steps], losses, "training", BLUE)
    _finish(axes, losses)


def _draw_metrics(figure: Figure, run: RunFacts, names: Sequence[str]) -> None:
    rows = -(-len(names) // 3)
    grid = figure.subplots(rows, 3, squeeze=False)
    epochs = [record.epoch for record in run.history]
    for number, axes in enumerate(grid.flat):
        if number >= len(names):
            axes.set_axis_off()
            continue
        axes.set(title=plain(names[number], 32), xlabel="epoch")
        for split, label, color in (("train", "training", BLUE), ("validation", "validation", ORANGE)):
            values = [record.value(f"{split}_{names[number]}") for record in run.history]
            if any(math.isfinite(value) for value in values):
                line(axes, epochs, values, label, color)
        whole_ticks(axes)
        if axes.lines:
            axes.legend(fontsize=8)


def _finish(axes: Axes, values: Sequence[float]) -> None:
    whole_ticks(axes)
    maybe_log(axes, values)
    if not any(math.isfinite(value) for value in values):
        axes.text(0.5, 0.5, "no finite value", ha="center", transform=axes.transAxes, color=GRAY)


def _gaps(run: RunFacts) -> list[str]:
    """Returns a sentence for each loss with values that are not finite."""
    found = []
    for name, title in (("train_loss", "training loss"), ("validation_loss", "validation loss")):
        values = [r.value(name) for r in run.history if getattr(r, name) is not None]
        bad = sum(not math.isfinite(value) for value in values)
        if bad:
            found.append(f"The {title} was not a finite number in {bad:,} of {len(values):,} epochs.")
    return found


def _table(run: RunFacts) -> Table:
    places = first_and_last(len(run.history), MOST_EPOCHS)
    names = entries_of(run)[:8]
    rows = []
    for place in places:
        record = run.history[place]
        values = [show(record.value(name)) for name in names]
        rows.append([show(record.epoch), *values, f"{record.learning_rate:.3g}", seconds(record.seconds)])
    left_out = len(run.history) - len(places)
    note = f"{left_out:,} epochs between the first and the last are not shown." if left_out else ""
    at = run.outcome.model_epoch if run.outcome is not None else 0
    marked = frozenset(i for i, place in enumerate(places) if run.history[place].epoch == at)
    note = f"{note} The marked row is the model's epoch.".strip() if marked else note
    header = ["epoch", *names, "learning rate", "time"]
    return Table(header, rows, words=frozenset(), note=note, marked=marked)
