"""`MemoryPlan`: the bytes of one training step on one rank, as numbers, a table and a chart."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from ringspark.estimators.training.settings.byte_sizes import show_bytes
from ringspark.pipelines.notebook_table import align_table, notebook_table

# Part -> its title in a table.
TITLES = {
    "parameters": "parameters and buffers",
    "gradients": "gradients",
    "optimizer_state": "optimizer state",
    "activations": "activations and temporaries",
    "batch": "rows of the batch",
    "communication": "communication buffers",
    "checkpoint": "copy for a checkpoint",
}


# Power of two -> unit of the chart.
_UNITS = ((40, "TiB"), (30, "GiB"), (20, "MiB"), (10, "KiB"), (0, "B"))


@dataclass(frozen=True, kw_only=True)
class MemoryPlan:
    """The memory of one optimizer step on one rank, in bytes of tensors.

    The parts peak at different moments, so `peak` is less than their sum: gradients grow while activations
    are released. The memory of Python, Spark and the reader does not count.

    Attributes:
        settings: Values of the Params that determine memory, by name.
        rows: Rows per rank and optimizer step.
        parameters: Parameters and buffers.
        gradients: Maximum during the backward pass.
        optimizer_state: State of the optimizer, from the second step on.
        activations: Maximum of tensors kept for the backward pass and temporaries of operators.
        batch: Inputs and labels.
        communication: Buffers that carry gradients or parameters between ranks.
        checkpoint: Copy of the weights, their average and the optimizer state on the host of the rank that
            copies most. It exists from a checkpoint until the copy is written, next to the training's steps.
            `peak` includes it if the settings write checkpoints and train on the CPU. With `sync=Zero(...)`
            each rank copies its shard of the tensors.
        peak: Maximum of all parts together.
        at_peak: Part -> bytes at the moment of the peak; they add up to `peak`.
        budget: Bytes that the peak is compared with, or None.
        suggest: Other settings that fit the budget, the cheapest first; empty if this plan fits.
        verdict: One sentence on whether the plan fits the budget; "" without a budget.
    """

    settings: Mapping[str, object]
    rows: int
    parameters: int
    gradients: int
    optimizer_state: int
    activations: int
    batch: int
    communication: int
    checkpoint: int
    peak: int
    at_peak: Mapping[str, int]
    budget: int | None = None
    suggest: tuple[MemoryPlan, ...] = ()
    verdict: str = ""

    @property
    def fits(self) -> bool:
        """Whether the peak is within the budget; True without a budget."""
        return self.budget is None or self.peak <= self.budget

    def table(self) -> str:
        """Returns a text with a line per part: its maximum and its bytes at the peak."""
        return f"{align_table(_HEADER, self._rows(), num_left=1)}\n{self.verdict}".rstrip()

    def _rows(self) -> list[tuple[str, str, str]]:
        parts = TITLES.items()
        rows = [(title, show_bytes(getattr(self, p)), show_bytes(self.at_peak[p])) for p, title in parts]
        return [*rows, ("peak", "", show_bytes(self.peak))]

    def save_chart(self, path: str) -> None:
        """Writes a PNG bar chart of the parts at the peak of this plan and the plans in `suggest`.

        Raises ImportError if matplotlib is not installed.
        """
        try:
            # Unlike pyplot, the class sets no backend for the process.
            from matplotlib.figure import Figure
        except ImportError:
            raise ImportError("a plan's chart needs matplotlib; pip install 'ringspark[examples]'") from None
        plans = (self, *self.suggest)
        names = [_label(each) for each in plans]
        figure = Figure(figsize=(9, 1.6 + 0.55 * len(plans)), layout="constrained")
        axes = figure.add_subplot()
        most = max([each.peak for each in plans] + [self.budget or 0])
        power, unit = next(unit for unit in _UNITS if most >= 1 << unit[0])
        scale = 1 << power
        left = [0.0] * len(plans)
        for part, title in TITLES.items():
            sizes = [each.at_peak[part] / scale for each in plans]
            if any(sizes):
                axes.barh(names, sizes, left=left, label=title)
                left = [a + b for a, b in zip(left, sizes, strict=True)]
        for y, each in enumerate(plans):
            axes.text(left[y], y, f" {show_bytes(each.peak)}", va="center")
        if self.budget is not None:
            label = f"budget {show_bytes(self.budget)}"
            axes.axvline(self.budget / scale, color="black", linestyle="--", label=label)
        axes.invert_yaxis()
        axes.margins(x=0.15)
        axes.set_xlabel(f"{unit} per worker at the peak of a step")
        figure.legend(loc="outside upper center", ncols=3)
        figure.savefig(path, format="png", dpi=120)

    __str__ = table

    def _repr_html_(self) -> str:
        notes = [self.verdict, *(f"{_label(plan)}: {show_bytes(plan.peak)}." for plan in self.suggest)]
        return notebook_table(
            f"Memory of a step of {self.rows:,} rows: {_label(self)}",
            _HEADER,
            self._rows(),
            " ".join(filter(None, notes)),
        )


def _label(plan: MemoryPlan) -> str:
    return changed_settings(plan.settings, DEFAULTS) or "default settings"


_HEADER = ("", "most", "at the peak")
DEFAULTS: Mapping[str, object] = {
    "precision": "fp32",
    "gradientCheckpointing": "none",
    "gradientAccumulation": 1,
    "activationOffload": "none",
    "activationCompression": "none",
    "sharding": "none",
}


def changed_settings(settings: Mapping[str, object], base: Mapping[str, object]) -> str:
    """Returns the differences from `base`, such as "sharding='gradients' with precision='bf16'"."""
    return " with ".join(f"{k}={settings[k]!r}" for k in DEFAULTS if settings[k] != base[k])
