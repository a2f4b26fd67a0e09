"""Draws the charts: figures without pyplot, and SVG that stands in a page of its own.

Text of users is escaped for matplotlib (`plain`), where a pair of dollars would begin a formula. The SVG has
no address in it that a browser would ask for; letters stay letters, so that pages are small and can be
searched.
"""

from __future__ import annotations

import io
import math
import re
import warnings
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

BLUE, ORANGE, GREEN, RED, GRAY = "#2b6cb0", "#dd6b20", "#2f855a", "#c53030", "#718096"
COLORS = (BLUE, ORANGE, GREEN, RED, "#6b46c1", "#b7791f", "#0987a0", "#97266d", "#4a5568", "#9ae6b4")
# Points of a line; more would not be seen.
MOST_POINTS = 500
# Inches of the page's width.
WIDTH = 10.0

Numbers = npt.NDArray[np.float64]

_STYLE: Any = {
    "svg.fonttype": "none",
    # Names in the SVG are the same for the same drawing.
    "svg.hashsalt": "ringspark",
    "font.size": 9,
    "axes.titlesize": 10,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "grid.alpha": 0.25,
    "legend.frameon": False,
    "path.simplify": True,
}


def plain(text: str, most: int = 40) -> str:
    """Returns a user's text in the form that matplotlib draws as it is, of bounded length."""
    text = "".join(c if c.isprintable() else " " for c in text)
    text = text if len(text) <= most else f"{text[: most - 3]}..."
    return text.replace("\\", "\\\\").replace("$", r"\$") if "$" in text else text


def new_figure(height: float, width: float = WIDTH) -> Figure:
    """Returns an empty figure, of inches; unlike pyplot's it leaves nothing behind in this process."""
    from matplotlib.figure import Figure

    return Figure(figsize=(width, height), layout="constrained")


def figure_of(draw: Callable[[Figure], None], height: float, width: float = WIDTH) -> Figure:
    """Returns the figure that `draw` draws."""
    import matplotlib as mpl

    with mpl.rc_context(_STYLE):
        figure = new_figure(height, width)
        draw(figure)
    return figure


def drawn(draw: Callable[[Figure], None], height: float, width: float = WIDTH) -> str:
    """Returns the SVG of what `draw` draws."""
    import matplotlib as mpl

    with mpl.rc_context(_STYLE), warnings.catch_warnings():
        # The browser has letters that matplotlib's font has not.
        warnings.filterwarnings("ignore", message="Glyph .* missing")
        figure = new_figure(height, width)
        draw(figure)
        text = io.StringIO()
        figure.savefig(text, format="svg", metadata=dict.fromkeys(("Date", "Creator", "Format", "Type")))
    # The declaration and the document type, with its address, are for files of their own.
    svg = text.getvalue()
    return re.sub(r"\s*\n\s*", "\n", svg[svg.index("<svg") :])


def line(axes: Axes, x: Sequence[float], y: Sequence[float], label: str, color: str, **more: Any) -> None:
    """Draws a line through at most `MOST_POINTS` means; values that are no numbers are gaps."""
    xs, ys = thinned(np.asarray(x, dtype=np.float64), np.asarray(y, dtype=np.float64))
    marker: dict[str, Any] = {"marker": "o", "markersize": 4} if len(xs) <= 40 else {}
    axes.plot(xs, ys, color=color, label=label, linewidth=1.5, **(marker | more))


def thinned(x: Numbers, y: Numbers, most: int = MOST_POINTS) -> tuple[Numbers, Numbers]:
    """Returns at most `most` points: the means of neighbours, over those that are finite."""
    y = np.where(np.isfinite(y), y, np.nan)
    if len(x) <= most:
        return x, y
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="Mean of empty slice")
        pieces = np.array_split(np.arange(len(x)), most)
        return (
            np.array([x[piece].mean() for piece in pieces]),
            np.array([np.nanmean(y[piece]) for piece in pieces]),
        )


def whole_ticks(axes: Axes) -> None:
    """Marks whole numbers alone on the x axis, such as epochs."""
    from matplotlib.ticker import MaxNLocator

    axes.xaxis.set_major_locator(MaxNLocator(integer=True, nbins=10))


def maybe_log(axes: Axes, values: Sequence[float]) -> None:
    """Sets a logarithmic y axis where the values span more than a factor of 50."""
    finite = [v for v in values if math.isfinite(v)]
    if finite and min(finite) > 0 and max(finite) / min(finite) > 50:
        axes.set_yscale("log")
