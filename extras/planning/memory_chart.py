"""Draws memory plans as a bar chart."""

from __future__ import annotations

from ringspark.estimators.training.settings.byte_sizes import show_bytes
from ringspark.extras.planning.memory.report import DEFAULTS, TITLES, MemoryPlan, changed_settings

# Power of two -> unit.
_UNITS = ((40, "TiB"), (30, "GiB"), (20, "MiB"), (10, "KiB"), (0, "B"))


def draw_chart(plan: MemoryPlan, path: str) -> None:
    """Writes a PNG that shows the parts of the peak memory, for a plan and for each of its suggestions.

    Raises:
        ImportError: matplotlib is not installed.
    """
    try:
        # Unlike pyplot, the class sets no backend for the process.
        from matplotlib.figure import Figure
    except ImportError:
        raise ImportError("a plan's chart needs matplotlib; pip install 'ringspark[examples]'") from None
    plans = (plan, *plan.suggest)
    names = [changed_settings(each.settings, DEFAULTS) or "default settings" for each in plans]
    figure = Figure(figsize=(9, 1.6 + 0.55 * len(plans)), layout="constrained")
    axes = figure.add_subplot()
    most = max([each.peak for each in plans] + [plan.budget or 0])
    power, unit = next((unit for unit in _UNITS if most >= 1 << unit[0]), _UNITS[-1])
    scale = 1 << power
    left = [0.0] * len(plans)
    for part, title in TITLES.items():
        sizes = [each.at_peak[part] / scale for each in plans]
        if any(sizes):
            axes.barh(names, sizes, left=left, label=title)
            left = [a + b for a, b in zip(left, sizes, strict=True)]
    for y, each in enumerate(plans):
        axes.text(left[y], y, f" {show_bytes(each.peak)}", va="center")
    if plan.budget is not None:
        label = f"budget {show_bytes(plan.budget)}"
        axes.axvline(plan.budget / scale, color="black", linestyle="--", label=label)
    axes.invert_yaxis()
    axes.margins(x=0.15)
    axes.set_xlabel(f"{unit} per worker at the peak of a step")
    figure.legend(loc="outside upper center", ncols=3)
    figure.savefig(path, format="png", dpi=120)
