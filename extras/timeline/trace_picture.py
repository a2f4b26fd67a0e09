"""Draws a few recorded steps of all ranks: one bar per rank, one color per kind of span.

Some ranks may already or still be in a neighbouring step; such steps are drawn in pale colors.
"""

from __future__ import annotations

import io
from collections.abc import Sequence

from ringspark.extras.timeline.span_file import read_spans
from ringspark.extras.timeline.trace import OTHER, TraceSlice, make_slices
from ringspark.pipelines import storage

COLORS = {
    "read": "tab:olive",
    "transform": "tab:brown",
    "forward": "tab:blue",
    "backward": "tab:cyan",
    "exchange": "tab:orange",
    "wait": "mistyrose",
    "step": "tab:green",
    "checkpoint": "tab:purple",
    "validation": "tab:pink",
    OTHER: "lightgray",
}
_HEIGHT = 0.72
_PALE = 0.35


def trace_picture(run_uri: str, path: str, *, first_step: int | None = None, num_steps: int = 3) -> str:
    """Writes a picture of some recorded steps to a file on any store; returns `path`.

    Args:
        path: File ending in `.png` or `.svg`.
        first_step: Number of the first step. None chooses steps from the middle of the training's last
            launch.

    Raises:
        ValueError: The run has no timeline, or no such step.
        ImportError: matplotlib is not installed.
    """
    try:
        # Unlike pyplot, the class leaves no window, backend or figure in this process.
        from matplotlib.figure import Figure
    except ImportError:
        raise ImportError("a timeline's picture needs matplotlib; pip install 'ringspark[report]'") from None
    pieces, chosen = _choose(make_slices(read_spans(run_uri)), first_step, num_steps)
    if not chosen:
        raise ValueError(
            f"the timeline of {run_uri!r} has no step from {first_step} on; give an earlier first_step"
        )
    ranks = sorted({piece.rank for piece in pieces})
    wholes = [piece for piece in pieces if piece.is_whole and piece.step in chosen]
    zero, last = min(piece.begin_ns for piece in wholes), max(piece.end_ns for piece in wholes)
    figure = Figure(figsize=(12, 1.6 + 0.7 * len(ranks)), layout="constrained")
    axes = figure.add_subplot()
    # Inner slices come later, and are drawn over outer slices.
    for piece in sorted(pieces, key=lambda piece: (not piece.is_whole, piece.begin_ns, -piece.end_ns)):
        bar = ((piece.begin_ns - zero) / 1e6, (piece.end_ns - piece.begin_ns) / 1e6)
        row = ranks.index(piece.rank)
        color = COLORS[OTHER if piece.is_whole else piece.kind]
        alpha = 1.0 if piece.step in chosen else _PALE
        if alpha < 1 and not piece.is_whole:
            # Otherwise the step below would shine through.
            axes.broken_barh([bar], (row - _HEIGHT / 2, _HEIGHT), facecolors="white")
        axes.broken_barh([bar], (row - _HEIGHT / 2, _HEIGHT), facecolors=color, alpha=alpha)
        if piece.is_whole and alpha == 1:
            axes.plot([bar[0]] * 2, [row - _HEIGHT / 2, row + _HEIGHT / 2], color="black", linewidth=0.8)
            if row == 0:
                axes.text(bar[0], -_HEIGHT / 2 - 0.06, f" {piece.kind}", va="bottom", fontsize=9)
    for kind, color in COLORS.items():
        if kind == OTHER or any(piece.kind == kind for piece in pieces):
            label = {"wait": "wait for the last rank", OTHER: "rest of the step"}.get(kind, kind)
            axes.broken_barh([], (0, 0), facecolors=color, label=label)
    axes.set_yticks(range(len(ranks)), [f"rank {rank}" for rank in ranks])
    axes.set_ylim(len(ranks) - 0.5, -0.8)
    axes.set_xlim(0, (last - zero) / 1e6)
    axes.set_xlabel("ms, by the clock of rank 0")
    figure.legend(loc="outside upper center", ncols=len(COLORS), frameon=False)
    image = io.BytesIO()
    figure.savefig(image, format=path.rpartition(".")[2].lower(), dpi=110)
    storage.write_atomic(storage.normalize(path), image.getvalue())
    return path


def _choose(
    pieces: Sequence[TraceSlice], first_step: int | None, num_steps: int
) -> tuple[list[TraceSlice], set[int]]:
    """Returns the slices to draw, and the numbers of the chosen steps.

    The slices are those of the chosen steps and their neighbours, all from the training's last launch.
    """
    last = max((piece.start for piece in pieces), default=0)
    own = [piece for piece in pieces if piece.start == last]
    steps = sorted({piece.step for piece in own if piece.is_whole})
    if first_step is None:
        middle = max(0, len(steps) - num_steps) // 2
        first_step = steps[middle] if steps else 0
    chosen = [step for step in steps if step >= first_step][:num_steps]
    # Ranks that are ahead or behind are in other steps.
    shown = {step for step in steps if chosen and chosen[0] - 2 <= step <= chosen[-1] + 2}
    # Device slices replace host slices if present.
    timed = {piece.step for piece in own if piece.is_on_device}
    found = [
        piece
        for piece in own
        if piece.step in shown
        and not piece.lane
        and (piece.rows is not None or piece.kind == "checkpoint")
        and (piece.is_whole or piece.is_on_device or piece.step not in timed)
    ]
    return found, set(chosen)
