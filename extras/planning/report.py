"""`ScalingPlan`: predicted times for several numbers of workers, as numbers and tables."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from ringspark.estimators.training.settings.byte_sizes import show_bytes
from ringspark.extras.planning.exchange_time import Link, show_seconds
from ringspark.extras.planning.work import NetworkWork
from ringspark.pipelines.notebook_table import align_table, notebook_table

# Smallest efficiency that the verdict calls worthwhile.
WORTHWHILE = 0.8


@dataclass(frozen=True, kw_only=True)
class Predicted:
    """Prediction for one number of workers.

    Attributes:
        rows: Rows per worker and step.
        compute_seconds: Time of forward pass, backward pass and update per step.
        exchange_seconds: Time of the all-reduce per step, including the part that the backward pass hides.
        exposed_seconds: Time of the part of the all-reduce that the backward pass does not hide.
        efficiency: Rows per second and worker, relative to a training on one worker.
        cost: Price of training on a million rows; in worker-seconds if no price was given.
    """

    workers: int
    rows: float
    compute_seconds: float
    exchange_seconds: float
    exposed_seconds: float
    efficiency: float
    cost: float

    @property
    def step_seconds(self) -> float:
        return self.compute_seconds + self.exposed_seconds

    @property
    def rows_per_second(self) -> float:
        return self.workers * self.rows / self.step_seconds


@dataclass(frozen=True, kw_only=True)
class ScalingPlan:
    """Prediction of how a training scales.

    Attributes:
        step_seconds: Measured or given seconds of a step on one worker, by its number of rows.
        fixed_seconds: Seconds of a step without rows.
        row_seconds: Seconds of a step per row.
        link: Link between the ranks of a host, or between all ranks if there is no `host_link`.
        host_link: Link between hosts; None if there is one host.
        gradient_bytes: Bytes that the ranks all-reduce in each step.
        network: Work and depth of the layers; None if they could not be counted.
    """

    predictions: tuple[Predicted, ...]
    step_seconds: Mapping[int, float]
    fixed_seconds: float
    row_seconds: float
    link: Link
    host_link: Link | None
    gradient_bytes: int
    network: NetworkWork | None
    has_price: bool = False

    def of(self, workers: int) -> Predicted:
        """Returns the prediction for `workers` workers.

        Raises:
            KeyError: The number was not planned.
        """
        by_workers = {predicted.workers: predicted for predicted in self.predictions}
        if workers not in by_workers:
            raise KeyError(f"{workers} workers are not planned; add {workers} to plan_scaling's `workers`")
        return by_workers[workers]

    @property
    def verdict(self) -> str:
        """A sentence that says how many workers are worthwhile."""
        good = [p.workers for p in self.predictions if p.efficiency >= WORTHWHILE]
        most = self.predictions[-1]
        if not good:
            return f"no planned number of workers keeps {WORTHWHILE:.0%} of one worker's speed"
        if good[-1] == most.workers:
            return f"{most.workers:,} workers each keep {most.efficiency:.0%} of one worker's speed"
        return (
            f"up to {good[-1]:,} workers each keep at least {WORTHWHILE:.0%} of one worker's speed; "
            f"with {most.workers:,} they keep {most.efficiency:.0%}, and communicate in "
            f"{most.exposed_seconds / most.step_seconds:.0%} of a step"
        )

    @property
    def facts(self) -> str:
        """A sentence with the measured or given numbers behind the prediction."""
        between = "" if self.host_link is None else f"; between hosts {self.host_link.describe()}"
        return (
            f"A step takes {show_seconds(self.fixed_seconds)} and {show_seconds(self.row_seconds)} per row; "
            f"{self.link.describe()}{between}; the workers all-reduce "
            f"{show_bytes(self.gradient_bytes)} per step."
        )

    def table(self) -> str:
        """Returns the facts, a table with a line per number of workers, and the verdict."""
        return "\n".join([self.facts, align_table(self._header, self._rows()), self.verdict])

    def layers_table(self) -> str:
        """Returns a table with work and depth of each layer; "" if they could not be counted."""
        return "" if self.network is None else align_table(_LAYERS_HEADER, self._layers())

    def __str__(self) -> str:
        layers = self.layers_table()
        return self.table() + (f"\n\n{layers}" if layers else "")

    def _repr_html_(self) -> str:
        shown = notebook_table(self.facts, self._header, self._rows(), self.verdict)
        if self.network is None:
            return shown
        return shown + notebook_table("Work and depth of a forward pass", _LAYERS_HEADER, self._layers())

    @property
    def _header(self) -> Sequence[str]:
        cost = "price of a million rows" if self.has_price else "worker-seconds, million rows"
        return ("workers", "rows each", "step", "exchange", "hidden", "rows/s", "efficiency", cost)

    def _rows(self) -> list[tuple[str, ...]]:
        return [
            (
                f"{p.workers:,}",
                f"{p.rows:,.4g}",
                show_seconds(p.step_seconds),
                show_seconds(p.exchange_seconds),
                f"{1 - p.exposed_seconds / p.exchange_seconds:.0%}" if p.exchange_seconds else "",
                f"{p.rows_per_second:,.0f}",
                f"{p.efficiency:.3f}",
                f"{p.cost:,.4g}",
            )
            for p in self.predictions
        ]

    def _layers(self) -> list[tuple[str, ...]]:
        assert self.network is not None
        network = self.network
        lines = [(a.name or "(network)", a.kind, a.work, a.depth, a.parameters) for a in network.layers]
        parameters = sum(layer.parameters for layer in network.layers)
        lines.append(("all", "", network.work, network.depth, parameters))
        return [
            (name, kind, f"{work:,}", f"{depth:,}", f"{work / max(1, depth):,.0f}", f"{parameters:,}")
            for name, kind, work, depth, parameters in lines
        ]


_LAYERS_HEADER = ("layer", "kind", "work", "depth", "work / depth", "parameters")
