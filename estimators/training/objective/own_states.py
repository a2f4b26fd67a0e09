"""The states of the user's own metrics, on one rank and merged over all ranks."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from ringspark.estimators.training.objective.losses import match_shapes
from ringspark.estimators.training.objective.metric_formulas import Formula

# The key of a state that counts rows.
_ROWS = "#rows"
CLASS_FAMILIES = ("Binary", "Multiclass", "Multilabel")


class RowMean(Formula):
    """The mean of a function that returns one number per row."""

    def __init__(self, function: Callable[..., Any]) -> None:
        super().__init__()
        self._function = function

    def update(self, output: torch.Tensor, label: torch.Tensor) -> None:
        values = self._function(match_shapes(output, label), label)
        if not is_per_row(values, len(label)):
            raise ValueError(
                f"the function returned one number per row on the driver, but {describe_value(values)} here"
            )
        values = values.float() if values.device.type == "mps" else values.double()
        self.merge_state({"sum": values.sum(), _ROWS: torch.tensor(len(label))})

    def compute(self) -> Any:
        return self.metric_state["sum"] / self.metric_state[_ROWS]


class AllRows(Formula):
    """A function that returns one number for all rows: every rank keeps the rows of all ranks."""

    def __init__(self, function: Callable[..., Any]) -> None:
        super().__init__()
        self._function = function

    def reset(self) -> None:
        self.metric_state = {"outputs": [], "labels": []}

    def update(self, output: torch.Tensor, label: torch.Tensor) -> None:
        self.metric_state["outputs"].append(match_shapes(output, label))
        self.metric_state["labels"].append(label)

    def merge_state(self, other: Mapping[str, Any]) -> None:
        for key, kept in self.metric_state.items():
            kept.extend(other.get(key, []))

    def compute(self) -> Any:
        return self._function(*(torch.cat(kept) for kept in self.metric_state.values()))


class Reduced:
    """A torchmetrics object, merged by the rules of its `add_state` but without torch.distributed."""

    def __init__(self, metric: Any, device: torch.device) -> None:
        self._metric = metric.clone().to(device)
        # With torch.distributed as the collective, the metric itself would synchronize.
        self._metric.distributed_available_fn = lambda: False
        self._rules: dict[str, Any] = self._metric._reductions
        self.reset()

    @property
    def metric_state(self) -> dict[str, Any]:
        own = {
            key: ([_cat(state)] if state else []) if isinstance(state, list) else state
            for key, state in self._metric.metric_state.items()
        }
        return own | {_ROWS: torch.tensor(self._rows)}

    def update(self, output: torch.Tensor, label: torch.Tensor) -> None:
        self._metric.update(*_arguments(self._metric, output, label))
        self._rows += len(label)

    def merge_state(self, state: Mapping[str, Any]) -> None:
        if int(state[_ROWS]):
            self._parts.append(state)

    def load_state(self, state: Mapping[str, Any]) -> None:
        self.reset()
        self._set({key: value for key, value in state.items() if key != _ROWS})
        self._rows = int(state[_ROWS])

    def compute(self) -> Any:
        rows = [int(part[_ROWS]) for part in self._parts]
        names = {key for part in self._parts for key in part if key != _ROWS}
        self._set({name: _merge(self._rules.get(name), name, self._parts, rows) for name in names})
        return self._metric.compute()

    def reset(self) -> None:
        self._metric.reset()
        self._parts: list[Mapping[str, Any]] = []
        self._rows = 0

    def _set(self, states: Mapping[str, Any]) -> None:
        set_states(self._metric, states, type(self._metric).__name__)


# The rows that a metric has seen, on one rank or on all.
OwnState = RowMean | AllRows | Reduced


def set_states(metric: Any, states: Mapping[str, Any], name: str) -> None:
    """Sets states of a torchmetrics object; raises ValueError for a state that it lacks."""
    # Merging them into zeros would change the shape of a state that is not summed.
    if unknown := sorted(states.keys() - metric.metric_state.keys()):
        raise ValueError(
            f"the checkpoint's metric {name} has a state {unknown[0]!r}, which the metric lacks now; "
            "continue with the torchmetrics version that wrote it, or start again"
        )
    for key, state in states.items():
        setattr(metric, key, state)


def _cat(parts: Sequence[torch.Tensor]) -> torch.Tensor:
    return torch.cat([part.reshape(1) if part.dim() == 0 else part for part in parts])


def _merge(rule: Any, name: str, parts: Sequence[Mapping[str, Any]], rows: Sequence[int]) -> Any:
    """Merges one state of the ranks that have rows, like torchmetrics' own synchronization."""
    from torchmetrics.utilities.data import dim_zero_cat, dim_zero_mean

    states = [part[name] for part in parts if name in part]
    if isinstance(states[0], list):
        return [piece for state in states for piece in state]
    if len(states) == 1:
        return states[0]
    if rule is dim_zero_cat:
        return _cat(states)
    stacked = torch.stack(states)  # (ranks, ...)
    if rule is dim_zero_mean:
        # By rows, because a mean of the ranks' means depends on how many rows each rank has.
        weights = torch.tensor(rows, dtype=torch.float64).view(-1, *(1,) * states[0].dim())
        return ((stacked * weights).sum(0) / weights.sum()).to(stacked.dtype)
    return stacked if rule is None else rule(stacked)


def make_own_state(metric: Any, per_row: bool, device: torch.device) -> OwnState:
    if is_torchmetric(metric):
        return Reduced(metric, device)
    return RowMean(metric) if per_row else AllRows(metric)


def is_torchmetric(metric: Any) -> bool:
    # Whoever has a metric has imported torchmetrics.
    package = sys.modules.get("torchmetrics")
    if package is None:
        return False
    return issubclass(metric if isinstance(metric, type) else type(metric), package.Metric)


def find_family(metric: Any) -> str:
    """Returns one of `CLASS_FAMILIES` or "regression" for a torchmetrics object; "" for other metrics."""
    for kind in type(metric).__mro__:
        if kind.__module__.startswith("torchmetrics.classification"):
            for family in CLASS_FAMILIES:
                if kind.__name__.startswith(family):
                    return family
        if kind.__module__.startswith("torchmetrics.regression"):
            return "regression"
    return ""


def _arguments(metric: Any, output: torch.Tensor, label: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns outputs and labels as a torchmetrics object takes them."""
    # A classification metric gets probabilities: it would mistake logits that all lie in 0..1 for them.
    family = find_family(metric)
    if family not in CLASS_FAMILIES:
        output = match_shapes(output, label)
        return (output.to(metric.dtype), label.to(metric.dtype)) if family else (output, label)
    if label.dim() > 1 and label.numel() == len(label):
        label = label.reshape(-1)
    logits, label = output if output.device.type == "mps" else output.double(), label.long()
    single = logits.numel() == label.numel()
    if family == "Multilabel" or (family == "Binary" and single):
        probabilities = logits.reshape(label.shape).sigmoid()
    elif family == "Binary":
        probabilities = (logits[:, 1] - logits[:, 0]).sigmoid() if logits.shape[1] == 2 else logits.sigmoid()
    else:
        if single:
            # Log odds z equal the two logits (0, z).
            logits = torch.stack([torch.zeros_like(logits), logits], 1).reshape(len(label), 2)
        probabilities = logits.softmax(1)  # (batch, classes, ...)
    return probabilities.to(metric.dtype), label


def is_per_row(values: Any, num_rows: int) -> bool:
    return isinstance(values, torch.Tensor) and values.shape == (num_rows,)


def describe_value(value: Any) -> str:
    is_tensor = isinstance(value, torch.Tensor)
    return f"a tensor {tuple(value.shape)}" if is_tensor else f"a {type(value).__name__}"
