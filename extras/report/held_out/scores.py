"""Compares predictions with labels, for a report on held-out rows. Pure functions."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from ringspark.extras.report.held_out.findings import (
    CONFIDENCE_BINS,
    ClassFindings,
    Counts,
    NumberFindings,
    Numbers,
)

# Lower limit of probabilities, because the logarithm of 0 is not finite.
LEAST_PROBABILITY = 1e-15
RESIDUAL_BINS = 41
PREDICTION_BINS = 20
# Fewest rows per bin: a mean of few rows is noise.
BIN_ROWS = 20
# Points of the scatter plot; each is an element of the page.
MOST_POINTS = 1000


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
    pairs, counts = np.unique(np.stack([labels, predicted], axis=1), axis=0, return_counts=True)
    confidence, right = probabilities.max(axis=1, initial=0.0), probabilities.argmax(axis=1) == labels
    num_classes = probabilities.shape[1]
    if num_classes == 2:
        confidence, right = probabilities[:, 1], labels == 1
    return ClassFindings(
        num_classes=num_classes,
        confusion={(int(true), int(found)): int(n) for (true, found), n in zip(pairs, counts, strict=True)},
        confidence=_binned(confidence, right),
        roc=roc_curve(probabilities[:, 1], labels == 1) if num_classes == 2 else None,
        log_loss=log_loss(probabilities, labels),
        skipped=skipped,
        names=names,
        has_thresholds=has_thresholds,
    )


def log_loss(probabilities: Numbers, labels: Counts) -> float:
    """Returns the mean negative logarithm of the probability of the true class; NaN if there are no rows."""
    if not len(labels):
        return float("nan")
    of_true = probabilities[np.arange(len(labels)), labels]
    return float(-np.log(np.maximum(of_true, LEAST_PROBABILITY)).mean())


def roc_curve(
    scores: Numbers, is_positive: np.ndarray[tuple[int], np.dtype[np.bool_]]
) -> tuple[Numbers, Numbers] | None:
    """Returns false and true positive rates per threshold; None if all rows have the same class."""
    positives = int(is_positive.sum())
    if not 0 < positives < len(scores):
        return None
    order = np.argsort(-scores, kind="stable")
    ordered, found = scores[order], is_positive[order]
    # Rows with equal scores pass together, because none of them ranks above another.
    last = np.flatnonzero(np.append(np.diff(ordered) != 0, True))
    true = np.concatenate([[0.0], np.cumsum(found)[last] / positives])
    false = np.concatenate([[0.0], np.cumsum(~found)[last] / (len(scores) - positives)])
    return false, true


def number_findings(
    predicted: Numbers, labels: Numbers, *, seed: int = 0, skipped: int = 0
) -> NumberFindings:
    """Compares predictions with labels, each (numbers,)."""
    residuals = predicted - labels
    kept = np.random.default_rng(seed).permutation(len(labels))[:MOST_POINTS]
    counts, edges = np.histogram(residuals, bins=RESIDUAL_BINS, range=_range(residuals))
    # Bins with equal numbers of predictions; equal predictions leave some bins empty.
    num_bins = min(PREDICTION_BINS, max(1, len(labels) // BIN_ROWS))
    bins = []
    if len(labels):
        ends = np.unique(np.quantile(predicted, np.linspace(0, 1, num_bins + 1)))
        places = np.searchsorted(ends[1:-1], predicted, side="right")
        bins = [places == number for number in range(max(1, len(ends) - 1))]
    return NumberFindings(
        numbers=len(labels),
        total_squares=float(((labels - labels.mean()) ** 2).sum()) if len(labels) else 0.0,
        sum_squared=float((residuals**2).sum()),
        sum_absolute=float(np.abs(residuals).sum()),
        sum_residual=float(residuals.sum()),
        residual_edges=edges,
        residual_counts=counts.astype(np.int64),
        bin_predicted=np.array([predicted[rows].mean() for rows in bins if rows.any()]),
        bin_true=np.array([labels[rows].mean() for rows in bins if rows.any()]),
        sample=np.stack([predicted, labels], axis=1)[kept],
        skipped=skipped,
    )


def _range(values: Numbers) -> tuple[float, float]:
    """Returns the range of a histogram; it is widened if the values differ only by rounding errors."""
    low, high = (float(values.min()), float(values.max())) if len(values) else (0.0, 0.0)
    least = 2 * RESIDUAL_BINS * float(np.spacing(max(abs(low), abs(high))))
    if high - low > least:
        return low, high
    half = max(0.5, least)
    return (low + high) / 2 - half, (low + high) / 2 + half


def _binned(confidence: Numbers, right: np.ndarray[tuple[int], np.dtype[np.bool_]]) -> Numbers:
    places = np.minimum((confidence * CONFIDENCE_BINS).astype(np.int64), CONFIDENCE_BINS - 1)
    sums = [
        np.bincount(places, weights=weights, minlength=CONFIDENCE_BINS)
        for weights in (np.ones(len(confidence)), confidence, right.astype(np.float64))
    ]
    return np.stack(sums, axis=1)
