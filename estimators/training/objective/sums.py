"""Sums losses and metrics over the rows of one split, per epoch."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

import torch
from torch import nn

from ringspark.estimators.collectives import Collective
from ringspark.estimators.training.objective.heads import Head
from ringspark.estimators.training.objective.layer_counts import LayerCounts
from ringspark.estimators.training.objective.metric_set import MetricSet, group_by_number, tensors_under
from ringspark.models.generators import Tensors
from ringspark.models.reports import CountingLayer, CountingLayerInfo


class MicroBatchOutput(NamedTuple):
    """The results of one micro-batch."""

    losses: torch.Tensor  # each head's weighted loss summed over the rows, (num_heads,)
    weights: torch.Tensor | float  # the rows' weight in each loss, (num_heads,); a number if all are equal
    pairs: list[tuple[torch.Tensor, torch.Tensor]]  # each head's output and label, if metrics need them
    counts: Mapping[CountingLayer, torch.Tensor]

    @property
    def is_finite(self) -> bool:
        """Whether all losses are finite; waits for the device."""
        return bool(self.losses.isfinite().all())


class Sums:
    """Losses and metrics of the rows of one split on this rank, since the last `take`."""

    def __init__(
        self,
        split: str,
        heads: Sequence[Head],
        device: torch.device,
        network: nn.Module | None = None,
        *,
        with_metrics: bool = True,
        layers: Sequence[CountingLayerInfo] | None = None,
        stages: Collective | None = None,
    ) -> None:
        """Starts without rows; `network`, `layers` and `stages` are for `LayerCounts`."""
        self._split = split
        self._heads = tuple(heads)
        # float64, so that the mean over many millions of rows is exact to the printed digits.
        dtype = torch.float32 if device.type == "mps" else torch.float64
        self._losses = torch.zeros((2, len(heads)), dtype=dtype, device=device)
        self._loss_sums, self._weight_sums = self._losses  # views
        self._metrics = [
            MetricSet(
                head.metrics if with_metrics else (),
                head.width,
                device,
                head.ignored,
                head.own_metrics,
                head.quantiles,
            )
            for head in heads
        ]
        self._counts = LayerCounts(network, device, layers, stages)
        # Whether `add` needs outputs and labels.
        self.takes_outputs = any(metric_set.names for metric_set in self._metrics)

    def add(self, results: Iterable[MicroBatchOutput], *, metrics_only: bool = False) -> None:
        """Adds results without waiting for the device.

        `metrics_only` is for a step with a loss that is not finite: only rows with finite outputs are added,
        and only to the metrics.
        """
        for losses, weights, pairs, counts in results:
            self._counts.add(counts)
            if not metrics_only:
                self._loss_sums.add_(losses)
                self._weight_sums.add_(weights)
            for metric_set, (output, label) in zip(self._metrics, pairs, strict=False):
                if metrics_only:
                    kept = output.reshape(len(output), -1).isfinite().all(1)
                    output, label = output[kept], label[kept]
                metric_set.update(output, label)

    def totals(self) -> torch.Tensor:
        """Copies the sums of losses and weights, (2, num_heads), without waiting for the device."""
        return self._losses.detach().clone()

    def mean_loss(self, totals: torch.Tensor, data: Collective | None) -> float:
        """Returns the mean loss of `totals` over all ranks of `data`, or of this rank. Runs on every rank."""
        own = totals.cpu()
        losses, weights = own if data is None else data.all_reduce(own.flatten()).view_as(totals)
        means = (losses / weights).tolist()
        return float(sum(head.weight * mean for head, mean in zip(self._heads, means, strict=True)))

    def take(self, data: Collective) -> dict[str, float]:
        """Returns the history's entries over all ranks of `data`, and resets the sums. Runs on every rank."""
        losses, weights = data.all_reduce(self._losses.cpu().flatten()).view_as(self._losses)
        means: list[float] = (losses / weights).tolist()
        is_one = len(self._heads) == 1
        pairs = list(zip(self._heads, means, strict=True))
        values = {f"{self._split}_loss": sum(head.weight * mean for head, mean in pairs)}
        if not is_one:
            values |= {f"{self._split}_loss_{head.label}": mean for head, mean in pairs}
        for head, metric_set in zip(self._heads, self._metrics, strict=True):
            suffix = "" if is_one else f"_{head.label}"
            for name, value in metric_set.compute(data).items():
                values[f"{self._split}_{name}{suffix}"] = value
        values |= {f"{self._split}_{name}": value for name, value in self._counts.take(data).items()}
        self.reset()
        return values

    def reset(self) -> None:
        self._losses.zero_()
        self._counts.reset()
        for metric_set in self._metrics:
            metric_set.reset()

    def state(self) -> Tensors:
        """Copies the sums to the CPU.

        Keys are "totals", "metrics/<head>/<number>/<key>", and "counts" if layers count.
        """
        result = {"totals": self._losses.detach().cpu().clone()}
        if (counts := self._counts.state()) is not None:
            result["counts"] = counts
        for index, metric_set in enumerate(self._metrics):
            for number, states in enumerate(metric_set.states()):
                result |= {f"metrics/{index}/{number}/{key}": state for key, state in states.items()}
        return result

    def load(self, state: Mapping[str, torch.Tensor]) -> None:
        """Restores a result of `state`; raises ValueError for other heads or metrics."""
        self._load_losses(state["totals"])
        self._counts.load([state["counts"]] if "counts" in state else ())
        for index, metric_set in enumerate(self._metrics):
            metric_set.load_states(group_by_number(tensors_under(state, f"metrics/{index}")))

    def load_all(
        self,
        states: Sequence[Mapping[str, torch.Tensor]],
        takes_all: bool,
        counting: Sequence[Mapping[str, torch.Tensor]] | None = None,
    ) -> None:
        """Adds up all ranks' sums in a checkpoint if `takes_all`, on one data rank; else starts at zero.

        Layer counts come from the states in `counting`, if given.
        """
        total = torch.stack([state["totals"] for state in states]).sum(0)
        self._load_losses(total if takes_all else torch.zeros_like(total))
        counting = states if counting is None else counting
        self._counts.load_all([state["counts"] for state in counting if "counts" in state], takes_all)
        for index, metric_set in enumerate(self._metrics):
            former = [tensors_under(state, f"metrics/{index}") for state in states if takes_all]
            carried = [own for tensors in former for own in group_by_number(tensors)]
            metric_set.load_states(carried, carried=True)

    def _load_losses(self, totals: torch.Tensor) -> None:
        if totals.shape != self._losses.shape:
            raise ValueError(
                f"the checkpoint has sums of {totals.shape[-1]} losses, this training has "
                f"{self._losses.shape[1]}; give runUri a new folder"
            )
        self._losses.copy_(totals)
