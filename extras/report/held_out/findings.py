"""Compares predictions with labels, for a report on held-out rows. Pure functions and their results."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt
import torch

if TYPE_CHECKING:
    from ringspark.extras.tables.drift import ColumnDrift

Numbers = npt.NDArray[np.float64]
Counts = npt.NDArray[np.int64]
Flags = npt.NDArray[np.bool_]

# Bins of equal width for the calibration of the confidence.
CONFIDENCE_BINS = 15
# Lower limit of probabilities, because the logarithm of 0 is not finite.
LEAST_PROBABILITY = 1e-15
RESIDUAL_BINS = 41
PREDICTION_BINS = 20
# Fewest rows per bin: a mean of few rows is noise.
BIN_ROWS = 20
# Points of the scatter plot; each is an element of the page.
MOST_POINTS = 1000


@dataclass(frozen=True, kw_only=True)
class ClassFindings:
    """Results of a classifier on a sample of the held-out rows.

    Attributes:
        confusion: Number of rows for each pair (true class, predicted class).
        confidence: (bins, 3): for each bin of confidence, the number of rows, the sum of their confidences,
            and the number of correct rows. With two classes, the confidence is the probability of class 1,
            and rows of class 1 count as correct.
        calibration_error: Mean difference between confidence and accuracy per bin, weighted by rows (Naeini
            et al., 2015).
        roc: False and true positive rates, from the highest threshold to the lowest. None if there are more
            than two classes, or if all rows have the same class.
        skipped: Number of rows that have no prediction, or whose label is ignored or not finite.
        has_thresholds: Whether the predicted class was decided by the model's thresholds.
    """

    num_classes: int
    rows: int
    confusion: dict[tuple[int, int], int]
    confidence: Numbers
    accuracy: float
    calibration_error: float
    log_loss: float
    roc: tuple[Numbers, Numbers] | None
    skipped: int = 0
    names: Sequence[str] = ()
    has_thresholds: bool = False

    def name(self, number: int) -> str:
        """Returns the name of a class; its number if classes have no names."""
        return self.names[number] if number < len(self.names) else str(number)

    @property
    def roc_auc(self) -> float:
        """Area under the ROC curve; pairs with equal scores count as half. NaN if there is no curve."""
        if self.roc is None:
            return math.nan
        false, true = self.roc
        return float(((true[1:] + true[:-1]) / 2 * np.diff(false)).sum())


@dataclass(frozen=True, kw_only=True)
class NumberFindings:
    """Results of a regression on a sample of the held-out rows; counts every number of a vector label.

    Attributes:
        bias: Mean of prediction minus label.
        residual_edges, residual_counts: Histogram of prediction minus label.
        bin_predicted, bin_true: Mean prediction and mean label in each bin; quantiles of the predictions
            separate the bins.
        sample: Prediction and label of randomly chosen numbers; (numbers, 2).
        skipped: Number of rows that have no prediction.
    """

    numbers: int
    r2: float
    rmse: float
    mae: float
    bias: float
    residual_edges: Numbers
    residual_counts: Counts
    bin_predicted: Numbers
    bin_true: Numbers
    sample: Numbers
    skipped: int = 0


@dataclass(frozen=True, kw_only=True)
class Attribution:
    """Importance of each feature, over a sample of the rows.

    Attributes:
        method: "permutation" or "integrated_gradients".
        spread: Standard deviation of each value over repetitions; empty if nothing was repeated.
        unit: Unit of the values.
    """

    method: str
    features: Sequence[str]
    values: Sequence[float]
    spread: Sequence[float] = ()
    rows: int
    unit: str
    note: str = ""


@dataclass(frozen=True, kw_only=True)
class HeldOut:
    """All results on held-out rows; `classes` and `numbers` are None if no row can be compared.

    Attributes:
        drift: Drift of each column of a table, the largest first.
        contributions: Contributions of each column of a table to the predictions of a few rows, (rows,); the
            key "" has the prediction for the baseline row.
    """

    classes: ClassFindings | None = None
    numbers: NumberFindings | None = None
    attribution: Attribution | None = None
    drift: Sequence[ColumnDrift] = ()
    contributions: Mapping[str, Numbers] = field(default_factory=dict)
    notes: Sequence[str] = ()


def class_findings(
    probabilities: Numbers,
    predicted: Counts,
    labels: Counts,
    *,
    names: Sequence[str] = (),
    skipped: int = 0,
    has_thresholds: bool = False,
) -> ClassFindings:
    """Compares predicted classes with labels, each (rows,); `probabilities` is (rows, classes)."""
    # Late, because reading a run's facts does not need it, and the import takes over a second.
    from torchmetrics.functional.classification import binary_roc

    pairs, counts = np.unique(np.stack([labels, predicted], axis=1), axis=0, return_counts=True)
    confidence, right = probabilities.max(axis=1), probabilities.argmax(axis=1) == labels
    num_classes = probabilities.shape[1]
    roc: tuple[Numbers, Numbers] | None = None
    if num_classes == 2:
        confidence, right = probabilities[:, 1], labels == 1
        if 0 < right.sum() < len(right):
            false, true, _ = binary_roc(torch.tensor(confidence), torch.tensor(labels))
            roc = false.numpy(), true.numpy()
    bins = _bin_confidence(confidence, right)
    return ClassFindings(
        num_classes=num_classes,
        rows=len(labels),
        confusion={(int(true), int(found)): int(n) for (true, found), n in zip(pairs, counts, strict=True)},
        confidence=bins,
        accuracy=float((predicted == labels).mean()),
        calibration_error=float(np.abs(bins[:, 1] - bins[:, 2]).sum() / len(labels)),
        roc=roc,
        log_loss=log_loss(probabilities, labels),
        skipped=skipped,
        names=names,
        has_thresholds=has_thresholds,
    )


def log_loss(probabilities: Numbers, labels: Counts) -> float:
    """Returns the mean negative logarithm of the probability of the true class; NaN if there are no rows."""
    if not len(labels):
        return math.nan
    of_true = probabilities[np.arange(len(labels)), labels]
    return float(-np.log(np.maximum(of_true, LEAST_PROBABILITY)).mean())


def _bin_confidence(confidence: Numbers, right: Flags) -> Numbers:
    places = np.minimum((confidence * CONFIDENCE_BINS).astype(np.int64), CONFIDENCE_BINS - 1)
    sums = [
        np.bincount(places, weights=weights, minlength=CONFIDENCE_BINS)
        for weights in (np.ones(len(confidence)), confidence, right.astype(np.float64))
    ]
    return np.stack(sums, axis=1)


def number_findings(
    predicted: Numbers, labels: Numbers, *, seed: int = 0, skipped: int = 0
) -> NumberFindings:
    """Compares predictions with labels, each (numbers,)."""
    residuals = predicted - labels
    kept = np.random.default_rng(seed).permutation(len(labels))[:MOST_POINTS]
    counts, edges = np.histogram(residuals, bins=RESIDUAL_BINS, range=_range(residuals))
    # Bins with equal numbers of predictions; equal predictions leave some bins empty.
    num_bins = min(PREDICTION_BINS, max(1, len(labels) // BIN_ROWS))
    ends = np.unique(np.quantile(predicted, np.linspace(0, 1, num_bins + 1)))
    places = np.searchsorted(ends[1:-1], predicted, side="right")
    bins = [places == number for number in np.unique(places)]
    spread = labels.var()
    return NumberFindings(
        numbers=len(labels),
        r2=float(1 - (residuals**2).mean() / spread) if spread else math.nan,
        rmse=float(np.sqrt((residuals**2).mean())),
        mae=float(np.abs(residuals).mean()),
        bias=float(residuals.mean()),
        residual_edges=edges,
        residual_counts=counts.astype(np.int64),
        bin_predicted=np.array([predicted[rows].mean() for rows in bins]),
        bin_true=np.array([labels[rows].mean() for rows in bins]),
        sample=np.stack([predicted, labels], axis=1)[kept],
        skipped=skipped,
    )


def _range(values: Numbers) -> tuple[float, float]:
    """Returns the range of a histogram; it is widened if the values differ only by rounding errors."""
    low, high = float(values.min()), float(values.max())
    least = 2 * RESIDUAL_BINS * float(np.spacing(max(abs(low), abs(high))))
    if high - low > least:
        return low, high
    half = max(0.5, least)
    return (low + high) / 2 - half, (low + high) / 2 + half
