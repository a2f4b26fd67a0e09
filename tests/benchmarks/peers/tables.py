"""Prints a table per job from the contestants' results."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from statistics import median
from typing import Any

import harness

# Job -> figure -> its heading, its format, and whether lower is better.
FIGURES: dict[str, dict[str, tuple[str, str, bool]]] = {
    "network": {
        "first_fit": ("first fit, s", "{:.1f}", True),
        "start": ("of it start, s", "{:.1f}", True),
        "slope": ("slope, rows/s", "{:,.0f}", False),
        "transform": ("transform, s", "{:.2f}", True),
    },
    "reading": {"rate": ("rows/s", "{:,.0f}", False)},
    "flights": {
        "fit": ("fit, s", "{:.1f}", True),
        "transform": ("transform, s", "{:.2f}", True),
        "auc": ("test ROC AUC", "{:.4f}", False),
    },
}
FIGURES["table"] = FIGURES["flights"]
# Figures with a ratio to the first contestant of the job. A ratio of AUCs has no meaning.
COMPARED = {
    "network": ("first_fit", "slope"),
    "reading": ("rate",),
    "flights": ("fit",),
    "table": ("fit", "transform"),
}
TITLES = {
    "network": f"MLP {harness.DIM}-128-128-1, SGD, 3 epochs, {harness.NUM_WORKERS} workers, 1,024 rows each",
    "reading": "one process, shuffled batches of 1,024 as tensors, pyarrow 14",
    "flights": "flights, trained on months 1 to 8, judged on 10 to 12",
    "table": "30 columns of numbers, strings and dates, judged on a fifth as many rows",
}

# (job, name) -> its successful rounds, and the reason of the last failure.
Results = Mapping[tuple[str, str], tuple[list[dict[str, float]], str]]


def by_contestant(found: Sequence[dict[str, Any]], order: Sequence[tuple[str, str]]) -> Results:
    """Groups result lines by contestant, in the order of `order`."""
    results: dict[tuple[str, str], tuple[list[dict[str, float]], str]] = {}
    for key in order:
        own = [line for line in found if (line["job"], line["name"]) == key]
        if own:
            rounds = [line for line in own if "failed" not in line]
            results[key] = (rounds, next((line["failed"] for line in own[::-1] if "failed" in line), ""))
    return results


def values(results: Results, job: str, name: str, figure: str) -> list[float]:
    """Returns one figure of a contestant by round."""
    return [line[figure] for line in results[job, name][0]]


def times_better(results: Results, job: str, figure: str, ours: str, name: str) -> float | None:
    """Returns the median ratio over the rounds; above 1 means that `ours` is better."""
    less = FIGURES[job][figure][2]
    pairs = zip(values(results, job, ours, figure), values(results, job, name, figure), strict=False)
    ratios = [theirs / own if less else own / theirs for own, theirs in pairs]
    return median(ratios) if ratios else None


def ours_of(results: Results, job: str) -> list[str]:
    """Returns ringspark's contestants of a job that have results."""
    return [
        name for (of, name), (rounds, _) in results.items() if of == job and "ringspark" in name and rounds
    ]


def print_all(results: Results) -> None:
    """Prints one table per job."""
    for job in FIGURES:
        names = [name for of, name in results if of == job]
        if not names:
            continue
        ours = ours_of(results, job)
        rows = next((line["rows"] for rounds, _ in results.values() for line in rounds), 0)
        width = {"flights": "", "table": f", {int(rows):,} rows"}
        size = width.get(job, f", {int(rows):,} rows x {harness.DIM} fp32")
        counts = sorted({len(results[job, name][0]) for name in names})
        header = ["", *(heading for heading, _, _ in FIGURES[job].values())]
        header += [f"{figure.replace('_', ' ')}: speedup of ringspark" for figure in COMPARED[job]]
        harness.print_table(
            f"bench-peers, {job}: {TITLES[job]}{size}; medians of {'/'.join(map(str, counts))} rounds",
            [*header, "better than ringspark in"],
            [line(results, job, name, ours) for name in names],
        )
        if len(ours) > 1:
            print(f"x / x: against {' / '.join(ours)}")


def line(results: Results, job: str, name: str, ours: Sequence[str]) -> list[str]:
    """Returns a row of a contestant: medians, ratios to ringspark, and where it beats the first variant."""
    rounds, reason = results[job, name]
    if not rounds:
        blanks = ["-"] * (len(FIGURES[job]) + len(COMPARED[job]))
        return [name, *blanks, f"failed: {reason}"]
    cells = [name]
    for figure, (_, written, _) in FIGURES[job].items():
        cells.append(written.format(median(values(results, job, name, figure))))
    for figure in COMPARED[job]:
        ratios = [times_better(results, job, figure, own, name) for own in ours]
        cells.append(" / ".join(f"{ratio:.2f}" for ratio in ratios if ratio is not None) or "-")
    better = [
        figure.replace("_", " ")
        for figure in FIGURES[job]
        if ours and (times_better(results, job, figure, ours[0], name) or 1.0) < 1.0
    ]
    note = "" if name in ours or not ours else ", ".join(better) or "nothing"
    return [*cells, f"{note} ({reason})" if reason else note]
