"""Results of a model on held-out rows, as numbers for the sections."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

Numbers = npt.NDArray[np.float64]
Counts = npt.NDArray[np.int64]

# Bins of equal width for the calibration of the confidence.
CONFIDENCE_BINS = 15


@dataclass(frozen=True, kw_only=True)
class ClassFindings:
    """Results of a classifier on a sample of the held-out rows.

    Attributes:
        confusion: Number of rows for each pair (true class, predicted class).
        confidence: (bins, 3): for each bin of confidence, the number of rows, the sum of their confidences,
            and the number of correct rows. With two classes, the confidence is the probability of class 1,
            and rows of class 1 count as correct.
        roc: False and true positive rates, from the highest threshold to the lowest. None if there are more
            than two classes, or if all rows have the same class.
        skipped: Number of rows that have no prediction, or whose label is ignored or not finite.
        has_thresholds: Whether the predicted class was decided by the model's thresholds.
    """

    num_classes: int
    confusion: dict[tuple[int, int], int]
    confidence: Numbers
    roc: tuple[Numbers, Numbers] | None
    log_loss: float
    skipped: int = 0
    names: Sequence[str] = ()
    has_thresholds: bool = False

    @property
    def rows(self) -> int:
        return sum(self.confusion.values())

    @property
    def accuracy(self) -> float:
        hits = sum(count for (true, found), count in self.confusion.items() if true == found)
        return hits / self.rows if self.rows else math.nan

    @property
    def expected_calibration_error(self) -> float:
        """Mean difference between confidence and accuracy per bin, weighted by rows (Naeini et al., 2015)."""
        rows, confidence, right = self.confidence.T
        total = rows.sum()
        return float(np.abs(confidence - right).sum() / total) if total else math.nan

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
        total_squares: Sum of the labels' squared differences from their mean.
        residual_edges, residual_counts: Histogram of prediction minus label.
        bin_predicted, bin_true: Mean prediction and mean label in each bin; quantiles of the predictions
            separate the bins.
        sample: Prediction and label of randomly chosen numbers; (numbers, 2).
        skipped: Number of rows that have no prediction.
    """

    numbers: int
    total_squares: float
    sum_squared: float
    sum_absolute: float
    sum_residual: float
    residual_edges: Numbers
    residual_counts: Counts
    bin_predicted: Numbers
    bin_true: Numbers
    sample: Numbers
    skipped: int = 0

    @property
    def rmse(self) -> float:
        return math.sqrt(self.sum_squared / self.numbers) if self.numbers else math.nan

    @property
    def mae(self) -> float:
        return self.sum_absolute / self.numbers if self.numbers else math.nan

    @property
    def bias(self) -> float:
        """Mean of prediction minus label."""
        return self.sum_residual / self.numbers if self.numbers else math.nan

    @property
    def r2(self) -> float:
        return 1 - self.sum_squared / self.total_squares if self.total_squares else math.nan


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
    """All results on held-out rows."""

    classes: ClassFindings | None = None
    numbers: NumberFindings | None = None
    attribution: Attribution | None = None
    notes: Sequence[str] = ()
