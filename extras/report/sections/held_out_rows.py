"""Results on held-out rows: of a classifier, of a regression, and the importance of the features."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from ringspark.extras.report.content import Block, Cards, Chart, Table, shorten, show
from ringspark.extras.report.drawing import BLUE, GRAY, MOST_POINTS, ORANGE, draw_svg, plain
from ringspark.extras.report.facts import RunFacts
from ringspark.extras.report.held_out.findings import Attribution, ClassFindings, HeldOut, NumberFindings

if TYPE_CHECKING:
    from matplotlib.figure import Figure

# Classes in the matrix; the largest are shown separately, all smaller classes as one.
MOST_CLASSES = 20
MOST_FEATURES = 30
MOST_CONTRIBUTIONS = 6
TITLES = {"permutation": "Permutation importance", "integrated_gradients": "Integrated gradients"}

Matrix = npt.NDArray[np.int64]


def make_classes(run: RunFacts) -> Sequence[Block]:
    found = run.held_out.classes if run.held_out is not None else None
    if found is None:
        return []
    cards = [
        ("held-out rows", show(found.rows)),
        ("accuracy", f"{found.accuracy:.4f}"),
        ("log loss", show(found.log_loss)),
        ("expected calibration error", f"{found.calibration_error:.4f}"),
    ]
    note = ""
    if found.num_classes == 2:
        cards.insert(2, ("ROC AUC", "" if found.roc is None else f"{found.roc_auc:.4f}"))
        if found.roc is None:
            note = " The rows hold one class only, so there is no ROC curve."
    if found.skipped:
        note += f" {found.skipped:,} rows with no prediction or with an ignored label are left out."
    if found.has_thresholds:
        note += " The model's thresholds choose the predicted class."
    names, matrix = _shown_matrix(found)
    caption = "Rows by true class and predicted class; the shade is the share of the true class."
    if len(names) < found.num_classes:
        caption += (
            f" Shows the {MOST_CLASSES} largest of {found.num_classes:,} classes; the last entry is the rest."
        )
    blocks: list[Block] = [
        Cards(cards),
        Chart(draw_svg(lambda figure: _draw_classes(figure, found), 3.8), _caption(found) + note),
        Chart(draw_svg(lambda figure: _draw_matrix(figure, names, matrix), 1.6 + 0.3 * len(names)), caption),
    ]
    return [*blocks, _confusions(found)] if found.num_classes > 2 else blocks


def _rows_of_classes(found: ClassFindings) -> Counter[int]:
    sizes: Counter[int] = Counter()
    for (true, _), count in found.confusion.items():
        sizes[true] += count
    return sizes


def _shown_matrix(found: ClassFindings) -> tuple[list[str], Matrix]:
    """Returns class names and the confusion matrix [true, predicted]; small classes share the last entry."""
    sizes = _rows_of_classes(found)
    kept = list(range(found.num_classes))
    if found.num_classes > MOST_CLASSES + 1:
        kept = sorted(sorted(kept, key=lambda number: -sizes[number])[:MOST_CLASSES])
    place = {number: i for i, number in enumerate(kept)}
    names = [found.name(number) for number in kept]
    if len(kept) < found.num_classes:
        names.append(f"{found.num_classes - len(kept):,} others")
    matrix = np.zeros((len(names), len(names)), dtype=np.int64)
    for (true, predicted), count in found.confusion.items():
        matrix[place.get(true, len(kept)), place.get(predicted, len(kept))] += count
    return names, matrix


def _caption(found: ClassFindings) -> str:
    shares = "share of correct rows in each of 15 bins of the predicted class's probability"
    if found.num_classes == 2:
        shares = f"share of {_positive(found)} in each of 15 bins of its probability"
    first = f"Left: ROC curve of {_positive(found)}. Right: the" if found.roc is not None else "The"
    return f"{first} {shares}; below, the rows per bin."


def _positive(found: ClassFindings, most: int | None = None) -> str:
    """Returns a text for class 1 of two classes; shortens its name to `most` characters for a chart."""
    name = found.name(1) if most is None else plain(found.name(1), most)
    return f'class "{name}"' if found.names else f"class {name}"


def _draw_classes(figure: Figure, found: ClassFindings) -> None:
    grid = figure.add_gridspec(2, 1 if found.roc is None else 2, height_ratios=[3, 1])
    if found.roc is not None:
        axes = figure.add_subplot(grid[:, 0])
        false, true = found.roc
        places = np.unique(np.linspace(0, len(false) - 1, MOST_POINTS).astype(np.int64))
        axes.plot(false[places], true[places], color=BLUE)
        axes.plot([0, 1], [0, 1], ":", color=GRAY)
        axes.set(title="ROC", xlabel="false positive rate", ylabel="true positive rate", aspect="equal")
        axes.set(xlim=(-0.01, 1.01), ylim=(-0.01, 1.01))
    upper = figure.add_subplot(grid[0, -1])
    rows, confidence, right = found.confidence.T
    known = rows > 0
    upper.plot([0, 1], [0, 1], ":", color=GRAY, label="perfect")
    upper.plot(confidence[known] / rows[known], right[known] / rows[known], "o-", color=ORANGE, label="model")
    share = f"share of {_positive(found, 14)}" if found.num_classes == 2 else "share of correct rows"
    upper.set(title="Calibration", ylabel=share, xlim=(-0.01, 1.01), ylim=(-0.02, 1.02))
    upper.tick_params(labelbottom=False)
    upper.legend()
    lower = figure.add_subplot(grid[1, -1], sharex=upper)
    lower.bar((np.arange(len(rows)) + 0.5) / len(rows), rows, width=0.9 / len(rows), color=GRAY)
    label = _positive(found, 24) if found.num_classes == 2 else "the predicted class"
    lower.set(xlabel=f"probability of {label}", ylabel="rows")


def _draw_matrix(figure: Figure, names: Sequence[str], matrix: Matrix) -> None:
    # A small matrix does not use the whole width of the page.
    part = min(1.0, (3.0 + 0.55 * len(names)) / 10)
    grid = figure.add_gridspec(1, 2, width_ratios=[part, max(0.01, 1 - part)])
    axes = figure.add_subplot(grid[0, 0])
    totals = matrix.sum(axis=1, keepdims=True)
    shares = np.divide(matrix, totals, out=np.zeros(matrix.shape), where=totals > 0)
    axes.pcolormesh(shares, cmap="Blues", vmin=0, vmax=1, edgecolors="white", linewidth=0.5)
    places = np.arange(len(names)) + 0.5
    is_crowded = len(names) > 6 and max(map(len, names)) > 4
    axes.set_xticks(places, [plain(name, 14) for name in names], rotation=90 if is_crowded else 0)
    axes.set_yticks(places, [plain(name, 24) for name in names])
    axes.invert_yaxis()
    axes.grid(visible=False)
    axes.set(xlabel="predicted class", ylabel="true class")
    size = 8 if len(names) < 12 else 6.5
    for (row, column), count in np.ndenumerate(matrix):
        if count:
            color = "white" if shares[row, column] > 0.55 else "black"
            text = f"{count:,}" if count < 100_000 else f"{count:.1e}"
            axes.text(column + 0.5, row + 0.5, text, ha="center", va="center", color=color, fontsize=size)


def _confusions(found: ClassFindings) -> Table:
    totals = _rows_of_classes(found)
    wrong = sorted((-count, pair) for pair, count in found.confusion.items() if pair[0] != pair[1])
    rows = [
        [found.name(true), found.name(predicted), show(-count), f"{100 * -count / totals[true]:.1f} %"]
        for count, (true, predicted) in wrong
    ]
    header = ["true class", "predicted class", "rows", "of the true class"]
    return Table(header, rows, words=frozenset({0, 1}), title="Most frequent confusions", most=15)


def make_numbers(run: RunFacts) -> Sequence[Block]:
    found = run.held_out.numbers if run.held_out is not None else None
    if found is None:
        return []
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
    return [Cards(cards), Chart(draw_svg(lambda figure: _draw_numbers(figure, found), 3.8), caption)]


def _draw_numbers(figure: Figure, found: NumberFindings) -> None:
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


def make_features(run: RunFacts) -> Sequence[Block]:
    found = run.held_out.attribution if run.held_out is not None else None
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
    return [
        Chart(draw_svg(lambda figure: _draw_features(figure, found, shown), height), caption),
        Table(header, rows),
    ]


def make_drift(run: RunFacts) -> Sequence[Block]:
    found = run.held_out
    if found is None or not found.drift:
        return []
    rows = [
        [
            shorten(drift.column),
            f"{drift.psi:.3f}",
            "" if np.isnan(drift.wasserstein) else show(drift.wasserstein),
            *(
                "" if np.isnan(share) else f"{share:.1%}"
                for share in (drift.missing_before, drift.missing, drift.unknown_before, drift.unknown)
            ),
        ]
        for drift in found.drift
    ]
    header = ["column", "PSI", "Wasserstein distance", "missing in the training", "missing"]
    note = (
        "Held-out rows against training rows. A population stability index (PSI) below 0.1 is small, above "
        "0.25 large. The distance is in standard deviations. Names are unknown if the training saw them "
        "fewer than twice."
    )
    unknown = ["unknown in the training", "unknown"]
    return [Table([*header, *unknown], rows, note=note, title="Drift"), _contributions(found)]


def _contributions(found: HeldOut) -> Table:
    columns = dict(found.contributions)
    baseline = columns.pop("")
    rows = []
    for row, base in enumerate(baseline):
        numbers = {name: float(values[row]) for name, values in columns.items()}
        largest = sorted(numbers, key=lambda name: -abs(numbers[name]))[:MOST_CONTRIBUTIONS]
        text = ", ".join(f"{shorten(name, 40)} {numbers[name]:+.3g}" for name in largest if numbers[name])
        rows.append([show(base + sum(numbers.values())), show(float(base)), text])
    what = "prediction"
    if found.classes is not None:
        what = "log-odds of " + (_positive(found.classes) if found.classes.num_classes == 2 else "the class")
    note = (
        "How much each column adds to the prediction for a baseline row of medians and most frequent names."
    )
    header = [what, "baseline", "largest contributions"]
    return Table(header, rows, words=frozenset({2}), note=note, title="Contributions in a few rows")


def _draw_features(figure: Figure, found: Attribution, shown: Sequence[int]) -> None:
    axes = figure.subplots()
    places = range(len(shown))
    errors = [found.spread[i] for i in shown] if found.spread else None
    axes.barh(places, [found.values[i] for i in shown], xerr=errors, color=BLUE, ecolor=GRAY, height=0.7)
    axes.set_yticks(places, [plain(found.features[i]) for i in shown])
    axes.invert_yaxis()
    axes.axvline(0, color=GRAY, linewidth=0.8)
    axes.grid(axis="y", visible=False)
    axes.set_xlabel(found.unit)
