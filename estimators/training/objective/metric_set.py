"""Accumulates the metrics of one output on each rank's device, and merges them over all ranks.

torchmetrics' own synchronization needs torch.distributed, and hangs if a rank saw no rows.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from math import nan
from typing import Any

import torch
from safetensors.torch import load, save
from torch import nn
from torch.nn import functional

from ringspark.estimators.collectives import Collective
from ringspark.estimators.collectives.base import gather_bytes
from ringspark.estimators.training.objective.losses import PinballLoss
from ringspark.estimators.training.objective.metric_formulas import Formula, add_counts, class_counts
from ringspark.estimators.training.objective.metrics import METRICS, check_metrics
from ringspark.estimators.training.objective.own_metrics import to_number
from ringspark.estimators.training.objective.own_states import OwnState, make_own_state, set_states
from ringspark.models.generators import Tensors
from ringspark.models.process_state import ignore_warnings
from ringspark.models.quantiles import central


class MetricSet:
    """The metrics of one output."""

    def __init__(
        self,
        names: Sequence[str],
        output_width: int,
        device: torch.device,
        ignored: int | None = None,
        own: Mapping[str, tuple[Any, bool]] | None = None,
        quantiles: Sequence[float] = (),
    ) -> None:
        """Makes the metrics; raises like `check_metrics`.

        Args:
            names: Names in `METRICS` or in `own`; values come in this order.
            output_width: Size of the last output dimension; 1 for a single logit.
            ignored: Label of rows that are not counted.
            own: The user's metrics by name, each with whether it returns one number per row.
            quantiles: Probabilities of the quantiles that the output holds. Metrics of one value per row take
                the central one.
        """
        self._own = own or {}
        self.names = tuple(names)
        self._known = [name for name in names if name not in self._own]
        check_metrics(self._known, "any", len(quantiles))
        self._quantiles = quantiles
        self._pinball = PinballLoss(quantiles, device) if quantiles else None
        self._num_classes = max(2, output_width)
        self._ignored = ignored
        self._device = device
        # float64, so that sums over many millions of rows are exact to the printed digits.
        self._dtype = torch.float32 if device.type == "mps" else torch.float64
        self._metrics = {name: self._make(name, device) for name in self.names}
        self._rows = 0
        # States of ranks that no longer exist, for `compute`.
        self._carried: list[Tensors] = []

    def _make(self, name: str, device: torch.device) -> Any:
        if name in self._own:
            return make_own_state(*self._own[name], device)
        metric = METRICS[name].make(self._num_classes)
        # torchmetrics' `to` does not change dtypes.
        return metric if isinstance(metric, Formula) else metric.to(device).set_dtype(self._dtype)

    @torch.no_grad()
    def update(self, output: torch.Tensor, label: torch.Tensor) -> None:
        """Adds rows; waits for the device only if rows may be ignored.

        Raises ValueError if the shapes of output and label do not match.

        Args:
            output: (batch,) or (batch, width) logits, or values of the label's shape.
            label: (batch,) or (batch, 1) class numbers, or values.
        """
        if self._ignored is not None and self.names and label.numel() == len(label) == len(output):
            kept = label.reshape(-1) != self._ignored
            output, label = output[kept], label[kept]
        if not len(label) or not self.names:
            return
        arguments: dict[str, tuple[torch.Tensor, ...]] = {}
        if any(METRICS[name].task == "regression" for name in self._known):
            values = output
            if self._pinball is not None:
                values, given = output[:, central(self._quantiles)], label.reshape(-1)
                arguments |= {
                    "pinball_losses": (self._pinball(output, given),),
                    "covered": (((output[:, 0] <= given) & (given <= output[:, -1])).to(self._dtype),),
                }
            arguments |= self._value_arguments(values, label)
        if any(METRICS[name].task == "classification" for name in self._known):
            arguments |= self._class_arguments(output, label)
        for name, metric in self._metrics.items():
            if isinstance(metric, OwnState):
                _add(name, metric, output, label)
                continue
            takes = METRICS[name].takes
            if takes == "counts":
                add_counts(metric, *arguments[takes])
            else:
                metric.update(*arguments[takes])
        self._rows += len(label)

    def _value_arguments(
        self, output: torch.Tensor, label: torch.Tensor
    ) -> dict[str, tuple[torch.Tensor, ...]]:
        if output.numel() != label.numel() or len(output) != len(label):
            raise ValueError(
                "regression metrics need output and label of one shape, "
                f"got {tuple(output.shape)} and {tuple(label.shape)}; change the last layer"
            )
        label = label.to(self._dtype).contiguous()
        output = output.to(self._dtype).reshape(label.shape).contiguous()
        smallest = torch.finfo(self._dtype).eps  # as in scikit-learn: a label of 0 has a large error
        return {
            "values": (output, label),
            "relative_errors": ((output - label).abs() / label.abs().clamp(min=smallest),),
        }

    def _class_arguments(
        self, output: torch.Tensor, label: torch.Tensor
    ) -> dict[str, tuple[torch.Tensor, ...]]:
        logits = output.reshape(len(output), -1).to(self._dtype)  # (batch, 1 or classes)
        if label.numel() != len(label) or max(2, logits.shape[1]) != self._num_classes or output.dim() > 2:
            raise ValueError(
                f"classification metrics need logits (batch, {self._num_classes}) and one class number per "
                f"row, got {tuple(output.shape)} and labels {tuple(label.shape)}; leave the metrics out"
            )
        label = label.reshape(-1).long()
        if logits.shape[1] == 1:
            # Log odds z equal the two logits (0, z).
            logits = torch.cat([torch.zeros_like(logits), logits], dim=1)
        if self._num_classes == 2:
            # From the difference alone: softmax rounds equal differences differently, which breaks ties.
            probabilities = (logits[:, 1] - logits[:, 0]).sigmoid()  # (batch,), of class 1
        else:
            probabilities = logits.softmax(1)  # (batch, classes)
        return {
            "counts": (class_counts(logits.argmax(1), label, self._num_classes),),
            "probabilities": (probabilities, label),
            "logits": (logits, label),
            "log_losses": (functional.cross_entropy(logits, label, reduction="none"),),
        }

    def compute(self, collective: Collective) -> dict[str, float]:
        """Returns the metrics over all rows of all ranks, NaN if undefined. Runs on every rank."""
        if not self.names:
            return {}
        # Every rank makes this call; a rank without rows sends its empty state.
        mine = save({f"{i}/{key}": t for i, own in enumerate(self.states()) for key, t in own.items()})
        merged = {name: self._make(name, torch.device("cpu")) for name in self.names}
        num_rows = 0
        for theirs in gather_bytes(collective, mine):
            for states in group_by_number(load(theirs)):
                num_rows += int(states["rows"])
                for name, metric in merged.items():
                    own = _of_metric(states, name)
                    if own:
                        metric.merge_state(own)
        if not num_rows:
            return dict.fromkeys(self.names, nan)
        # torchmetrics warns that `update` was not called, but the merged states hold all rows.
        with ignore_warnings(category=UserWarning):
            values = [self._value(name, metric, num_rows) for name, metric in merged.items()]
        if self._own:
            # A user's code may return another number on each rank, but all ranks must decide alike by it.
            shared = torch.tensor(values, dtype=torch.float64)
            collective.broadcast([shared])
            values = shared.tolist()
        return dict(zip(merged, values, strict=True))

    def _value(self, name: str, metric: Any, num_rows: int) -> float:
        if not isinstance(metric, OwnState):
            return float(METRICS[name].finish(metric))
        try:
            return to_number(metric.compute())
        except Exception as error:
            raise ValueError(
                f"metric {name!r} failed on {num_rows} rows: {type(error).__name__}: {error}; return NaN "
                "where it is not defined"
            ) from error

    def states(self) -> list[Tensors]:
        """Copies all states to the CPU: this rank's own, then the states taken over from a checkpoint."""
        states = {"rows": torch.tensor(self._rows)}
        for name, metric in self._metrics.items():
            for key, state in metric.metric_state.items():
                if isinstance(state, list):
                    if state:
                        states[f"{name}/{key}/list"] = torch.cat(state).cpu()
                else:
                    states[f"{name}/{key}"] = state.cpu().clone().contiguous()
        return [states, *self._carried]

    def load_states(self, states: Sequence[Tensors], carried: bool = False) -> None:
        """Replaces all rows by a result of `states`. Raises ValueError if other metrics made the result.

        `carried`: Whether ranks of an earlier start made the states; they stay apart from this rank's rows.
        """
        self.reset()
        if carried or not states:
            self._carried = [dict(own) for own in states]
            return
        first, *rest = states
        self._carried = [dict(own) for own in rest]
        self._rows = int(first["rows"])
        for name, metric in self._metrics.items():
            # Copies, because tensors from a file are mapped.
            own = {
                key: [part.to(self._device, copy=True) for part in state]
                if isinstance(state, list)
                else state.to(self._device, copy=True)
                for key, state in _of_metric(first, name).items()
            }
            if isinstance(metric, nn.Module):
                set_states(metric, own, repr(name))
            else:
                metric.load_state(own)

    def reset(self) -> None:
        for metric in self._metrics.values():
            metric.reset()
        self._rows = 0
        self._carried = []


def _add(name: str, metric: OwnState, output: torch.Tensor, label: torch.Tensor) -> None:
    try:
        metric.update(output, label)
    except Exception as error:
        raise ValueError(
            f"metric {name!r} failed on outputs {tuple(output.shape)} and labels {tuple(label.shape)}: "
            f"{type(error).__name__}: {error}; correct the metric, or leave it out"
        ) from error


def tensors_under(tensors: Mapping[str, torch.Tensor], prefix: str) -> Tensors:
    """Returns the tensors "<prefix>/<name>" by name."""
    start = f"{prefix}/"
    # By keys, not items, because a `LazyMapping` reads a tensor from the file at each access.
    return {key.removeprefix(start): tensors[key] for key in tensors if key.startswith(start)}


def group_by_number(tensors: Tensors) -> list[Tensors]:
    """Groups the tensors "<number>/<name>" by their numbers."""
    numbers = sorted({int(key.split("/", 1)[0]) for key in tensors})
    return [tensors_under(tensors, str(number)) for number in numbers]


def _of_metric(states: Tensors, name: str) -> dict[str, Any]:
    """Returns one metric's states in the form that `merge_state` takes."""
    return {
        key.removesuffix("/list"): [state] if key.endswith("/list") else state
        for key, state in tensors_under(states, name).items()
    }
