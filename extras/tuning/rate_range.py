"""`lr_range_test`: one short training whose learning rate rises from step to step (Smith 2015).

The test is an ordinary `fit` with its own schedule, which records the loss after every step. Its epochs are
short, because a training can end early only after an epoch.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Annotated, Any

import numpy as np
import pandas as pd
from annotated_types import Ge, Gt
from pyspark.sql import DataFrame

from ringspark.estimators.options.checked import Finite, check
from ringspark.estimators.training.callbacks import Callback, TrainingState
from ringspark.estimators.training.step_log import read_steps
from ringspark.extras.runs.listing import remove_run_of
from ringspark.extras.tuning.short_training import check_estimator, plain_copy, prepare_training
from ringspark.pipelines.folder_removal import discard

# Relative to the lowest loss: a mean loss above 1 + 3 times it is divergence, below 1 + 1 times it is still
# stable.
_DIVERGED, _CALM = 3.0, 1.0
# Parts of the sweep after which it may end.
_PARTS = 10
_REASON = "the loss diverged"


@dataclass(frozen=True)
class Sweep:
    """Schedule: a factor that grows by the same ratio per step, from `first` to 1 in the last step."""

    first: float

    def __call__(self, step: int, num_steps: int) -> float:
        return float(self.first ** (1 - step / max(1, num_steps - 1)))


class StopsDiverged(Callback):
    """Ends the training when an epoch's mean loss over all ranks is far above the lowest loss so far."""

    def on_epoch_end(self, state: TrainingState) -> None:
        losses = [record.value("train_loss") for record in state.history]
        lowest = min(losses)
        if losses[-1] > lowest + _DIVERGED * abs(lowest):
            state.stop(_REASON)


@dataclass(frozen=True, kw_only=True)
class RateRange:
    """The result of a learning-rate range test.

    Attributes:
        table: One row per step: "step", "learning_rate", "train_loss" over all workers, and "smoothed", its
            moving mean. A step whose loss is not finite changes no weights and has loss NaN.
        suggestion: Rate at which the smoothed loss fell most steeply; None if it never fell.
        diverges_at: Last rate at which the smoothed loss was at most twice its minimum; None if the loss did
            not diverge.
    """

    table: pd.DataFrame
    suggestion: float | None
    diverges_at: float | None

    def plot(self, ax: Any = None) -> Any:
        """Plots the loss over the learning rate on `ax`, or on new matplotlib axes; returns the axes."""
        if ax is None:
            from matplotlib.figure import Figure

            ax = Figure(figsize=(6, 4)).subplots()
        ax.plot(self.table["learning_rate"], self.table["train_loss"], alpha=0.3, label="per step")
        ax.plot(self.table["learning_rate"], self.table["smoothed"], label="smoothed")
        for rate, name, style in ((self.suggestion, "suggestion", "-"), (self.diverges_at, "diverges", "--")):
            if rate is not None:
                ax.axvline(rate, color="gray", linestyle=style, label=f"{name} {rate:.2g}")
        ax.set(xscale="log", xlabel="learning rate", ylabel="training loss")
        ax.legend()
        return ax


def lr_range_test(
    estimator: Any, df: DataFrame, lowest: float = 1e-6, highest: float = 10.0, steps: int = 100
) -> RateRange:
    """Runs a short training with a rising learning rate, and suggests a rate.

    Trains on a sample of the rows, with the estimator's batch size, optimizer and workers. Ends early if the
    loss diverges. Leaves no folder behind and does not change the estimator.

    Args:
        estimator: An estimator of ringspark whose `optimizer` is a name.
        lowest: Rate of the first step.
        highest: Rate of the last step.
        steps: Number of optimizer steps, rounded to whole epochs.

    Raises:
        ValueError: An argument is invalid.
        WorkerError: A worker failed.
    """
    _check(estimator, lowest, highest, steps)
    estimator, df, rows = prepare_training(estimator, df, "lr_range_test")
    batch = estimator.getBatchSize()
    wanted = math.ceil(steps / _PARTS) * batch
    if rows > 1.2 * wanted:
        df, rows = df.sample(wanted / rows, estimator.getOrDefault("seed")), wanted
    sweep = plain_copy(estimator)
    sweep.clear(sweep.emaDecay)  # only the losses count
    sweep.setParams(
        learningRate=highest,
        lrSchedule=Sweep(lowest / highest),
        epochs=math.ceil(steps / math.ceil(rows / batch)),
        logEverySteps=1,
        onNonFinite="skip",
        callbacks=[*estimator.getOrDefault("callbacks"), StopsDiverged()],
    )
    model = sweep.fit(df)
    try:
        records = read_steps(model.summary.run_uri)
    finally:
        remove_run_of(model.summary, discard)
    has_diverged = model.summary.stop_reason == _REASON
    return rate_range([r.learning_rate for r in records], [r.train_loss for r in records], has_diverged)


def rate_range(rates: list[float], losses: list[float], has_diverged: bool = False) -> RateRange:
    """Evaluates the losses of a range test.

    A loss that is not finite is ignored if a finite loss follows; otherwise it is the start of divergence.
    `has_diverged` says that the training ended early because its loss diverged.
    """
    loss = np.asarray(losses, float)
    table = pd.DataFrame({"step": range(1, len(rates) + 1), "learning_rate": rates, "train_loss": loss})
    width = max(3, len(rates) // 20 | 1)
    finite = np.isfinite(loss)
    # Centered, so that it does not lag behind the rate.
    smoothed = table["train_loss"].where(finite).rolling(width, center=True, min_periods=1).mean()
    table["smoothed"] = smoothed
    # After a bad batch the sweep continues; after divergence no loss is finite.
    end = int(np.flatnonzero(finite)[-1]) + 1 if finite.any() else 0
    judged = smoothed[:end].interpolate(limit_direction="both").to_numpy()
    if not len(judged):
        return RateRange(table=table, suggestion=None, diverges_at=None)
    low = int(np.argmin(judged))
    bound = abs(judged[low])
    diverged = has_diverged or end < len(loss) or bool((judged[low:] > judged[low] + _DIVERGED * bound).any())
    last = int(np.flatnonzero(judged <= judged[low] + _CALM * bound)[-1]) if diverged else end - 1
    suggestion = None
    if last >= 1:
        slopes = np.gradient(judged[: last + 1], np.log(rates[: last + 1]))
        steepest = int(np.argmin(slopes))
        suggestion = float(rates[steepest]) if slopes[steepest] < 0 else None
    return RateRange(table=table, suggestion=suggestion, diverges_at=float(rates[last]) if diverged else None)


def _check(estimator: Any, lowest: Any, highest: Any, steps: Any) -> None:
    check_estimator(estimator, "lr_range_test")
    for name, value in (("lowest", lowest), ("highest", highest)):
        check(Annotated[float, Gt(0), Finite], value, name)
    if lowest >= highest:
        raise ValueError(f"lowest must be below highest, got {lowest!r} and {highest!r}")
    check(Annotated[int, Ge(10)], steps, "steps")
    if not isinstance(estimator.getOrDefault("optimizer"), str):
        raise ValueError(
            "lr_range_test needs the name of an optimizer, because a factory sets its own rate; set "
            "optimizer='sgd' or another name"
        )
