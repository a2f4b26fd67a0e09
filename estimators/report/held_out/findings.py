"""What a model says of rows that it was not trained on, as numbers: what the sections draw.

All of it is sums and bounded samples; no class here knows Spark or torch.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

Numbers = npt.NDArray[np.float64]
Counts = npt.NDArray[np.int64]

# Bins of equal width of the confidence, for calibration.
CONFIDENCE_BINS = 15
# Bins of the log odds of class 1, from -`MOST_ODDS` to `MOST_ODDS`, for curves over all thresholds.
ODDS_BINS = 8192
MOST_ODDS = 24.0


@dataclass(frozen=True, kw_only=True)
class ClassFindings:
    """Sums over the rows of a classification.

    Attributes:
        confusion: (true class, predicted class) -> rows.
        names: Names of the classes; empty if they are numbers.
        confidence: (bins, 3): rows, sum of the confidence, rows that were right. For two classes the
            probability of class 1 stands for the confidence, and rows of class 1 for those that were right.
        odds: (2, bins): rows of class 0 and 1 by their log odds of class 1; None of more than two classes.
        log_loss: Mean of the negative logarithm of the true class's probability.
        skipped: Rows that got no prediction, or whose label does not count.
        has_thresholds: Whether the predicted class was decided by the model's thresholds.
    """

    num_classes: int
    confusion: dict[tuple[int, int], int]
    confidence: Numbers
    odds: Counts | None
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
        """Mean distance of confidence and share of right rows over bins, by rows (Naeini et al., 2015)."""
        rows, confidence, right = self.confidence.T
        total = rows.sum()
        return float(np.abs(confidence - right).sum() / total) if total else math.nan

    def name(self, number: int) -> str:
        """Returns the name of a class."""
        return self.names[number] if number < len(self.names) else str(number)

    def roc(self) -> tuple[Numbers, Numbers]:
        """Returns rates of false and true positives, from the highest threshold to the lowest."""
        assert self.odds is not None
        negatives, positives = np.cumsum(self.odds[:, ::-1], axis=1).astype(np.float64)
        false = np.concatenate([[0.0], negatives]) / max(1.0, negatives[-1])
        true = np.concatenate([[0.0], positives]) / max(1.0, positives[-1])
        return false, true

    def roc_auc(self) -> tuple[float, float]:
        """Returns the area under the curve and the most by which the bins may have changed it."""
        assert self.odds is not None
        negatives, positives = self.odds.sum(axis=1)
        if not negatives or not positives:
            return math.nan, math.nan
        false, true = self.roc()
        # Pairs within one bin count half; they could count 0 or 1.
        error = float((self.odds[0] * (self.odds[1] / positives)).sum() / negatives) / 2
        return float(((true[1:] + true[:-1]) / 2 * np.diff(false)).sum()), error


@dataclass(frozen=True, kw_only=True)
class NumberFindings:
    """Sums over the numbers of a regression; of labels with several numbers a row, over all of them.

    Attributes:
        numbers: Numbers predicted.
        residual_edges: Edges of the residuals' bins (prediction minus label).
        residual_counts: Numbers in each.
        bin_predicted: Mean prediction in each bin of the prediction; NaN in an empty one.
        bin_true: Mean label in the same bins.
        sample: (numbers, 2): prediction and label of a random sample.
        skipped: Rows without a prediction.
    """

    numbers: int
    mean_true: float
    total_squares: float
    sum_squared: float
    sum_absolute: float
    sum_residual: float
    residual_edges: Numbers
    residual_counts: Counts
    bin_predicted: Numbers
    bin_true: Numbers
    bin_counts: Counts
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
    """How much each feature decides, over a sample of the rows.

    Attributes:
        method: "permutation" or "integrated_gradients".
        features: Names of the features.
        values: One number per feature.
        spread: Standard deviation of each over the repetitions; empty without them.
        rows: Rows of the sample.
        unit: What the numbers are.
        note: What was left out.
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
    """What a report tells of held-out rows."""

    classes: ClassFindings | None = None
    numbers: NumberFindings | None = None
    attribution: Attribution | None = None
    notes: Sequence[str] = field(default_factory=tuple)
