"""Metrics of predicted probabilities, a table for the terminal, and a page of plots."""

from __future__ import annotations

import io
import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypedDict

import numpy as np
import numpy.typing as npt

from ringspark.pipelines import storage

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

COLORS = ("tab:blue", "tab:orange", "tab:green", "tab:red")
CALIBRATION_BINS = 15


class Epoch(TypedDict):
    """One epoch of a training's history; a private training has no training loss."""

    epoch: int
    train_loss: float | None
    validation_loss: float | None
    learning_rate: float
    seconds: float


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


@dataclass(frozen=True, kw_only=True)
class Metrics:
    """ROC AUC and average precision (higher is better), and log loss (lower is better)."""

    roc_auc: float
    average_precision: float
    log_loss: float


def measure(scored: Scored) -> Metrics:
    from sklearn.metrics import average_precision_score, log_loss, roc_auc_score

    return Metrics(
        roc_auc=float(roc_auc_score(scored.labels, scored.probabilities)),
        average_precision=float(average_precision_score(scored.labels, scored.probabilities)),
        log_loss=float(log_loss(scored.labels, scored.probabilities)),
    )


def format_table(models: Sequence[Scored]) -> str:
    width = max(len("model"), *(len(scored.name) for scored in models))
    lines = [f"{'model':<{width}}  {'ROC AUC':>8}  {'average precision':>17}  {'log loss':>8}"]
    for scored in models:
        metrics = measure(scored)
        lines.append(
            f"{scored.name:<{width}}  {metrics.roc_auc:>8.4f}  "
            f"{metrics.average_precision:>17.4f}  {metrics.log_loss:>8.4f}"
        )
    return "\n".join(lines)


def read_history(uri: str) -> list[Epoch]:
    """Reads a training's history, a JSON list of epochs, or raises ValueError."""
    try:
        history: Any = json.loads(storage.read_bytes(uri))
        kept: list[Epoch] = [
            {key: entry[key] for key in Epoch.__annotations__}  # type: ignore[misc]
            for entry in history
        ]
    except (json.JSONDecodeError, KeyError, TypeError) as error:
        raise ValueError(
            f"{uri} must be a training history, a JSON list of objects with "
            f"{', '.join(Epoch.__annotations__)}: {error!r}"
        ) from error
    return kept


def draw_report(models: Sequence[Scored], history: Sequence[Epoch]) -> Figure:
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


def save_report(uri: str, models: Sequence[Scored], history: Sequence[Epoch]) -> None:
    image = io.BytesIO()
    draw_report(models, history).savefig(image, format="png", dpi=110)
    storage.write_atomic(uri, image.getvalue())


def _draw_history(axes: Axes, history: Sequence[Epoch]) -> None:
    axes.set(title="Learning curve", xlabel="epoch", ylabel="mean loss")
    if not history:
        axes.text(0.5, 0.5, "no history", ha="center", va="center", transform=axes.transAxes, color="gray")
        return
    epochs = [entry["epoch"] for entry in history]
    trained = {e["epoch"]: e["train_loss"] for e in history if e["train_loss"] is not None}
    if trained:
        axes.plot(list(trained), list(trained.values()), "o-", color=COLORS[0], label="training")
    held_out = {e["epoch"]: e["validation_loss"] for e in history if e["validation_loss"] is not None}
    if held_out:
        axes.plot(list(held_out), list(held_out.values()), "s-", color=COLORS[1], label="validation")
    axes.set_xticks(epochs if len(epochs) <= 12 else np.linspace(epochs[0], epochs[-1], 7).round())
    axes.grid(alpha=0.3)
    axes.legend()


def _draw_roc(axes: Axes, models: Sequence[Scored]) -> None:
    from sklearn.metrics import roc_curve

    for scored, color in zip(models, COLORS, strict=False):
        false_positive, true_positive, _ = roc_curve(scored.labels, scored.probabilities)
        label = f"{scored.name}, AUC {measure(scored).roc_auc:.4f}"
        axes.plot(false_positive, true_positive, color=color, label=label)
    axes.plot([0, 1], [0, 1], ":", color="gray", label="chance")
    axes.set(title="ROC, test rows", xlabel="false positive rate", ylabel="true positive rate")
    axes.set(xlim=(0, 1), ylim=(0, 1), aspect="equal")
    axes.grid(alpha=0.3)
    axes.legend(loc="lower right")


def _draw_calibration(axes: Axes, models: Sequence[Scored]) -> None:
    from sklearn.calibration import calibration_curve

    highest = 0.0
    for scored, color in zip(models, COLORS, strict=False):
        # Bins with equal numbers of rows; bins of equal width would have few rows at the right.
        share, predicted = calibration_curve(
            scored.labels, scored.probabilities, n_bins=CALIBRATION_BINS, strategy="quantile"
        )
        axes.plot(predicted, share, "o-", markersize=4, color=color, label=scored.name)
        highest = max(highest, float(share.max()), float(predicted.max()))
    limit = min(1.0, highest * 1.08)
    axes.plot([0, 1], [0, 1], ":", color="gray", label="perfect")
    axes.set(title="Calibration, test rows", ylabel="share of class 1", xlim=(0, 1), ylim=(0, limit))
    axes.tick_params(labelbottom=False)
    axes.grid(alpha=0.3)
    axes.legend()


def _draw_histogram(axes: Axes, models: Sequence[Scored]) -> None:
    bins = np.linspace(0, 1, 51).tolist()
    for scored, color in zip(models, COLORS, strict=False):
        axes.hist(scored.probabilities, bins=bins, histtype="step", color=color)
    axes.set(xlabel="predicted probability of class 1", ylabel="rows")
    axes.grid(alpha=0.3)
