"""Draws the charts: figures without pyplot, and SVG for an HTML page.

The SVG contains no address that a browser would load. Text stays text, so pages are small and searchable.
"""

from __future__ import annotations

import io
import math
import re
import warnings
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import pandas as pd

from ringspark.extras.report.content import shorten

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

BLUE, ORANGE, GREEN, RED, GRAY = "#2b6cb0", "#dd6b20", "#2f855a", "#c53030", "#718096"
COLORS = (BLUE, ORANGE, GREEN, RED, "#6b46c1", "#b7791f", "#0987a0", "#97266d", "#4a5568", "#9ae6b4")
# Points of a line; more would not be visible.
MOST_POINTS = 500
# Width of the page in inches.
WIDTH = 10.0

_STYLE: Any = {
    "svg.fonttype": "none",
    # Equal drawings get equal names in the SVG.
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
    """Escapes dollar signs in a user's text, which would mark a formula in matplotlib, and shortens it."""
    text = "".join(c if c.isprintable() else " " for c in text)
    text = shorten(text, most)
    return text.replace("\\", "\\\\").replace("$", r"\$") if "$" in text else text


def figure_of(draw: Callable[[Figure], None], height: float) -> Figure:
    """Returns the figure that `draw` fills; `height` is in inches."""
    import matplotlib as mpl

    # Unlike pyplot, the class leaves no state in the process.
    from matplotlib.figure import Figure

    with mpl.rc_context(_STYLE):
        figure = Figure(figsize=(WIDTH, height), layout="constrained")
        draw(figure)
    return figure


def draw_svg(draw: Callable[[Figure], None], height: float) -> str:
    """Returns the figure that `draw` fills, as SVG."""
    import matplotlib as mpl

    with mpl.rc_context(_STYLE), warnings.catch_warnings():
        # The browser has letters that matplotlib's font lacks.
        warnings.filterwarnings("ignore", message="Glyph .* missing")
        figure, text = figure_of(draw, height), io.StringIO()
        figure.savefig(text, format="svg", metadata=dict.fromkeys(("Date", "Creator", "Format", "Type")))
    # An SVG inside a page has no XML declaration and no document type, which holds an address.
    svg = text.getvalue()
    return re.sub(r"\s*\n\s*", "\n", svg[svg.index("<svg") :])


def line(axes: Axes, x: Sequence[float], y: Sequence[float], label: str, color: str) -> None:
    """Draws a line through at most `MOST_POINTS` points, each the mean of neighbours.

    Values that are not finite leave gaps.
    """
    points = pd.DataFrame({"x": x, "y": y}, dtype=np.float64).replace([np.inf, -np.inf], np.nan)
    places = np.arange(len(points)) * MOST_POINTS // max(MOST_POINTS, len(points))
    shown = points.groupby(places).mean()
    marker: dict[str, Any] = {"marker": "o", "markersize": 4} if len(shown) <= 40 else {}
    axes.plot(shown["x"], shown["y"], color=color, label=label, linewidth=1.5, **marker)


def whole_ticks(axes: Axes) -> None:
    """Puts ticks only at whole numbers of the x axis, such as epochs."""
    from matplotlib.ticker import MaxNLocator

    axes.xaxis.set_major_locator(MaxNLocator(integer=True, nbins=10))


def maybe_log(axes: Axes, values: Sequence[float]) -> None:
    """Sets a logarithmic y axis if the values span more than a factor of 50."""
    finite = [v for v in values if math.isfinite(v)]
    if finite and min(finite) > 0 and max(finite) / min(finite) > 50:
        axes.set_yscale("log")
