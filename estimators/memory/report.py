"""`MemoryPlan`: the bytes of one training step on one rank, as numbers, a table and a chart."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from ringspark.estimators.training.settings.byte_sizes import show_bytes
from ringspark.pipelines.notebook_table import notebook_table

# Part -> its title in a table.
TITLES = {
    "parameters": "parameters and buffers",
    "gradients": "gradients",
    "optimizer_state": "optimizer state",
    "activations": "activations and temporaries",
    "batch": "rows of the batch",
    "communication": "communication buffers",
}


@dataclass(frozen=True, kw_only=True)
class MemoryPlan:
    """The memory of one optimizer step on one rank, in bytes of tensors.

    The parts do not peak at the same moment, so `peak` is less than their sum: gradients grow while
    activations are released. The memory of Python, Spark and the reader of the rows is not counted.

    Attributes:
        settings: Name and value of the Params that decide memory.
        rows: Rows per rank and optimizer step.
        parameters: Parameters and buffers.
        gradients: Their most at any moment of a backward pass.
        optimizer_state: State of the optimizer, from the second step on.
        activations: The most of tensors kept for the backward pass and operators' temporaries.
        batch: Inputs and labels.
        communication: Buffers that carry gradients or parameters between ranks.
        peak: The most bytes of all parts at one moment.
        at_peak: Part -> bytes at that moment; they add up to `peak`.
        budget: Bytes that the peak is compared with, or None.
        suggest: Other settings that fit the budget, the cheapest first; empty if this plan fits.
        verdict: One sentence on whether the budget is kept; "" without a budget.
    """

    settings: Mapping[str, object]
    rows: int
    parameters: int
    gradients: int
    optimizer_state: int
    activations: int
    batch: int
    communication: int
    peak: int
    at_peak: Mapping[str, int]
    budget: int | None = None
    suggest: tuple[MemoryPlan, ...] = ()
    verdict: str = ""

    @property
    def fits(self) -> bool:
        """Whether the peak is within the budget; True without one."""
        return self.budget is None or self.peak <= self.budget

    def table(self) -> str:
        """Returns a text with a line for each part: its most at any moment and its bytes at the peak."""
        width = max(map(len, TITLES.values()))
        header = f"{'':{width}}  {'most':>10}  {'at the peak':>11}"
        lines = [
            f"{title:{width}}  {show_bytes(getattr(self, part)):>10}  {show_bytes(self.at_peak[part]):>11}"
            for part, title in TITLES.items()
        ]
        total = f"{'peak':{width}}  {'':>10}  {show_bytes(self.peak):>11}"
        return "\n".join([header, *lines, total, *([self.verdict] if self.verdict else [])])

    def save_chart(self, path: str) -> None:
        """Writes a bar chart as PNG: this plan's parts at the peak, and those of `suggest` beside it.

        Raises:
            ImportError: matplotlib is not installed.
        """
        draw({_label(plan): plan for plan in (self, *self.suggest)}, path, self.budget)

    def __str__(self) -> str:
        return self.table()

    def _repr_html_(self) -> str:
        """Returns what a notebook shows: the table, and the settings that would fit."""
        rows = [
            (title, show_bytes(getattr(self, part)), show_bytes(self.at_peak[part]))
            for part, title in TITLES.items()
        ]
        told = [self.verdict, *(f"{_label(plan)}: {show_bytes(plan.peak)}." for plan in self.suggest)]
        return notebook_table(
            f"Memory of a step of {self.rows:,} rows: {_label(self)}",
            ["", "most", "at the peak"],
            [*rows, ("peak", "", show_bytes(self.peak))],
            " ".join(filter(None, told)),
        )


def draw(plans: Mapping[str, MemoryPlan], path: str, budget: int | None = None) -> None:
    """Writes stacked bars of plans' parts at their peaks as PNG.

    Raises:
        ImportError: matplotlib is not installed.
    """
    try:
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
    except ImportError:
        raise ImportError("a plan's chart needs matplotlib; pip install 'ringspark[examples]'") from None
    # The figure has its own canvas, because pyplot would set a backend for the process.
    figure = Figure(figsize=(9, 1.6 + 0.55 * len(plans)), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.add_subplot()
    names, scale, unit = list(plans), *_scale(max([p.peak for p in plans.values()] + [budget or 0]))
    left = [0.0] * len(plans)
    for part, title in TITLES.items():
        sizes = [plan.at_peak[part] / scale for plan in plans.values()]
        if any(sizes):
            axes.barh(names, sizes, left=left, label=title)
            left = [a + b for a, b in zip(left, sizes, strict=True)]
    for y, plan in enumerate(plans.values()):
        axes.text(left[y], y, f" {show_bytes(plan.peak)}", va="center")
    if budget is not None:
        axes.axvline(budget / scale, color="black", linestyle="--", label=f"budget {show_bytes(budget)}")
    axes.invert_yaxis()
    axes.margins(x=0.15)
    axes.set_xlabel(f"{unit} per worker at the peak of a step")
    figure.legend(loc="outside upper center", ncols=3)
    figure.savefig(path, format="png", dpi=120)


def _scale(most: int) -> tuple[int, str]:
    power = next((p for p in (40, 30, 20, 10) if most >= 1 << p), 0)
    return 1 << power, {40: "TiB", 30: "GiB", 20: "MiB", 10: "KiB", 0: "B"}[power]


def _label(plan: MemoryPlan) -> str:
    return changed_settings(plan.settings, DEFAULTS) or "default settings"


DEFAULTS: Mapping[str, object] = {
    "precision": "fp32",
    "gradientCheckpointing": "none",
    "gradientAccumulation": 1,
    "activationOffload": "none",
    "activationCompression": "none",
    "sharding": "none",
}


def changed_settings(settings: Mapping[str, object], base: Mapping[str, object]) -> str:
    """Returns what differs from `base`, such as "sharding='gradients' with precision='bf16'"."""
    return " with ".join(f"{k}={settings[k]!r}" for k in DEFAULTS if settings[k] != base[k])
