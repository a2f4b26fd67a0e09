"""Metrics of predicted probabilities, a table for the terminal, and a page of plots."""

from __future__ import annotations

import io
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from ringspark.pipelines import storage
from ringspark.pipelines.notebook_table import align_table

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

    from ringspark.estimators.training.history import EpochRecord

CALIBRATION_BINS = 15


@dataclass(frozen=True, kw_only=True)
class Scored:
    """Labels (0 or 1) and one model's probabilities of class 1, each of shape (rows,)."""

    name: str
    labels: npt.NDArray[np.int64]
    probabilities: npt.NDArray[np.float64]

    def __post_init__(self) -> None:
        if self.labels.shape != self.probabilities.shape or self.labels.ndim != 1:
            raise ValueError(
                f"{self.name}: labels and probabilities must be two columns of the same rows, "
                f"got {self.labels.shape} and {self.probabilities.shape}"
            )
        found = np.unique(self.labels).tolist()
        if found != [0, 1]:
            raise ValueError(f"{self.name}: the labels must hold both classes, 0 and 1, got {found}")


def format_table(models: Sequence[Scored]) -> str:
    """Returns ROC AUC and average precision (higher is better), and log loss (lower is better)."""
    from sklearn.metrics import average_precision_score, log_loss, roc_auc_score

    measures = (roc_auc_score, average_precision_score, log_loss)
    rows = [
        (each.name, *(f"{measure(each.labels, each.probabilities):.4f}" for measure in measures))
        for each in models
    ]
    return align_table(("model", "ROC AUC", "average precision", "log loss"), rows, num_left=1)


def draw_report(models: Sequence[Scored], history: Sequence[EpochRecord]) -> Figure:
    # Unlike pyplot, the class leaves no window, backend or figure in this process.
    from matplotlib.figure import Figure

    figure = Figure(figsize=(15, 4.8), layout="constrained")
    grid = figure.add_gridspec(2, 3, height_ratios=[3, 1])
    _draw_history(figure.add_subplot(grid[:, 0]), history)
    _draw_roc(figure.add_subplot(grid[:, 1]), models)
    calibration = figure.add_subplot(grid[0, 2])
    _draw_calibration(calibration, models)
    _draw_histogram(figure.add_subplot(grid[1, 2], sharex=calibration), models)
    return figure


def save_report(uri: str, models: Sequence[Scored], history: Sequence[EpochRecord]) -> None:
    image = io.BytesIO()
    draw_report(models, history).savefig(image, format="png", dpi=110)
    storage.write_atomic(uri, image.getvalue())


def _draw_history(axes: Axes, history: Sequence[EpochRecord]) -> None:
    from matplotlib.ticker import MaxNLocator

    axes.set(title="Learning curve", xlabel="epoch", ylabel="mean loss")
    if not history:
        axes.text(0.5, 0.5, "no history", ha="center", va="center", transform=axes.transAxes, color="gray")
        return
    for name, style in (("train", "o-"), ("validation", "s-")):
        losses = {entry.epoch: getattr(entry, f"{name}_loss") for entry in history}
        # A private training has no training loss, and some epochs may have no validation.
        known = {epoch: loss for epoch, loss in losses.items() if loss is not None}
        if known:
            axes.plot(list(known), list(known.values()), style, label=name)
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    axes.grid(alpha=0.3)
    axes.legend()


def _draw_roc(axes: Axes, models: Sequence[Scored]) -> None:
    from sklearn.metrics import RocCurveDisplay

    for scored in models:
        RocCurveDisplay.from_predictions(scored.labels, scored.probabilities, name=scored.name, ax=axes)
    axes.plot([0, 1], [0, 1], ":", color="gray", label="chance")
    axes.set(title="ROC, test rows", xlabel="false positive rate", ylabel="true positive rate")
    axes.grid(alpha=0.3)
    axes.legend(loc="lower right")


def _draw_calibration(axes: Axes, models: Sequence[Scored]) -> None:
    from sklearn.calibration import CalibrationDisplay

    highest = 0.0
    for scored in models:
        # Bins with equal numbers of rows; bins of equal width would have few rows at the right.
        shown = CalibrationDisplay.from_predictions(
            scored.labels,
            scored.probabilities,
            n_bins=CALIBRATION_BINS,
            strategy="quantile",
            name=scored.name,
            ax=axes,
        )
        highest = max(highest, *shown.prob_true, *shown.prob_pred)
    limit = min(1.0, highest * 1.08)
    axes.set(title="Calibration, test rows", xlabel="", ylabel="share of class 1")
    axes.set(xlim=(0, 1), ylim=(0, limit))
    axes.tick_params(labelbottom=False)
    axes.grid(alpha=0.3)


def _draw_histogram(axes: Axes, models: Sequence[Scored]) -> None:
    bins = np.linspace(0, 1, 51).tolist()
    for scored in models:
        axes.hist(scored.probabilities, bins=bins, histtype="step")
    axes.set(xlabel="predicted probability of class 1", ylabel="rows")
    axes.grid(alpha=0.3)
