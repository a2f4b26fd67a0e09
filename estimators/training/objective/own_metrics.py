"""Checks the user's own metrics (torchmetrics objects, functions of outputs and labels) on the driver."""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from ringspark.estimators.training.objective.losses import match_shapes
from ringspark.estimators.training.objective.metrics import METRICS, Task, metric_info
from ringspark.estimators.training.objective.own_states import (
    CLASS_FAMILIES,
    describe_value,
    find_family,
    is_per_row,
    is_torchmetric,
    make_own_state,
)
from ringspark.models.process_state import ignore_warnings


@dataclass(frozen=True, kw_only=True)
class OwnMetric:
    """Properties of a metric that the driver finds by a trial."""

    name: str
    per_row: bool  # a function that returns one number per row
    higher_is_better: bool | None


def get_task(metric: Any) -> Task | None:
    """Returns the task of a metric; None if it takes any labels."""
    if isinstance(metric, str):
        return metric_info(metric).task
    family = find_family(metric)
    if family in CLASS_FAMILIES:
        return "classification"
    return "regression" if family else None


def check_own_tasks(metrics: Mapping[str, Any], task: str) -> None:
    """Raises ValueError if a user's metric is for another task; the task "any" accepts all."""
    for name, metric in metrics.items():
        if task != "any" and get_task(metric) not in (None, task):
            raise ValueError(
                f"metric {name!r} is for {get_task(metric)}, but the task is {task}; drop it from metrics"
            )


def name_metrics(given: Sequence[Any]) -> dict[str, Any]:
    """Returns the metrics by their names in the history; a registered metric stays a name.

    `given` holds registered names, torchmetrics classes or objects, functions, and mappings from names to
    these. Raises ValueError or TypeError if one cannot be used.
    """
    found: dict[str, Any] = {}
    for entry in given:
        # A MetricCollection is no mapping, but has the items of one.
        is_mapping = isinstance(entry, Mapping) or type(entry).__name__ == "MetricCollection"
        for name, metric in entry.items() if is_mapping else [(_find_name(entry), entry)]:
            if name in found:
                raise ValueError(
                    f"metrics must differ from each other, got {name!r} more than once; drop one, or name "
                    f"them: metrics=[{{'first': ..., 'second': ...}}]"
                )
            found[name] = _check_entry(name, metric)
    return found


def _find_name(metric: Any) -> str:
    if isinstance(metric, str):
        return metric
    if isinstance(metric, functools.partial):
        return _find_name(metric.func)
    name = getattr(metric, "__name__", None) or type(metric).__name__
    if name == "<lambda>":
        raise ValueError(
            "metrics holds a lambda, which has no name for the history; name it, as in "
            "metrics=[{'error': lambda ...}]"
        )
    return str(name)


def _check_entry(name: Any, metric: Any) -> Any:
    """Returns the name of a registered metric, or the object; raises like `name_metrics`."""
    if isinstance(metric, str):
        metric_info(metric)
        if name != metric:
            raise ValueError(f"metrics renames {metric!r} to {name!r}; give {metric!r} without a name")
        return metric
    if not isinstance(name, str) or not name or "/" in name or name == "loss" or name.startswith("loss_"):
        raise ValueError(
            f"metrics has the name {name!r}, which the history cannot hold; use a text without '/' that is "
            "not 'loss' or 'loss_...'"
        )
    if isinstance(metric, type):
        if not is_torchmetric(metric):
            raise TypeError(f"metrics holds the class {name}; give an object of it, {name}(...)")
        try:
            metric = metric()
        except TypeError as error:
            raise ValueError(
                f"metrics holds the class {name}, which needs arguments ({error}); give {name}(...)"
            ) from None
    if is_torchmetric(metric):
        _check_states(name, metric)
    elif not callable(metric):
        raise TypeError(
            "metrics must hold names, torchmetrics objects or functions (outputs, labels), got "
            f"{type(metric).__name__}"
        )
    return metric


def _check_states(name: str, metric: Any) -> None:
    from torchmetrics import Metric
    from torchmetrics.utilities.data import dim_zero_cat

    inner = [part for part in metric.modules() if isinstance(part, Metric) and part is not metric]
    if inner:
        raise ValueError(
            f"metric {name!r} is made of other metrics, whose states it does not hold; give "
            f"{type(inner[0]).__name__} itself, and compute the rest from the history"
        )
    for key, state in metric.metric_state.items():
        if isinstance(state, list) and metric._reductions[key] is not dim_zero_cat:
            raise ValueError(
                f"metric {name!r} keeps a list {key!r} that it does not concatenate, so ranks cannot join "
                "their lists; declare it with dist_reduce_fx='cat', or give another metric"
            )


def to_number(value: Any) -> float:
    """Converts a metric's value to a float. The caller adds the metric's name to the ValueError's message."""
    try:
        if not isinstance(value, str | dict | list | tuple):
            return float(value)
    except (TypeError, ValueError, RuntimeError):
        pass
    raise ValueError(
        f"must give one number per row or one number, got {describe_value(value)}; average it, such as by "
        "average='macro', or give a function for each number"
    )


def try_metric(
    name: str, metric: Any, outputs: Sequence[torch.Tensor], labels: Sequence[torch.Tensor]
) -> OwnMetric:
    """Calls a metric on a few rows of each given output. Raises ValueError if the value is no number."""
    kinds = set()
    try:
        for output, label in zip(outputs, labels, strict=True):
            value, per_row = _trial(metric, output, label)
            kinds.add(per_row)
    except Exception as error:
        shapes = ", ".join(
            f"{tuple(o.shape)} and {tuple(n.shape)}" for o, n in zip(outputs, labels, strict=True)
        )
        raise ValueError(
            f"metric {name!r} cannot take outputs and labels of shapes {shapes}: {type(error).__name__}: "
            f"{error}; it is called as metric(outputs, labels)"
        ) from error
    try:
        to_number(value)
    except ValueError as error:
        raise ValueError(f"metric {name!r} {error}") from None
    if len(kinds) > 1:
        raise ValueError(
            f"metric {name!r} gives one number per row for one label and one number for another; give two "
            "metrics"
        )
    return OwnMetric(name=name, per_row=kinds.pop(), higher_is_better=higher_is_better(metric))


@torch.no_grad()
def _trial(metric: Any, output: torch.Tensor, label: torch.Tensor) -> tuple[Any, bool]:
    """Returns the metric's value, and whether it returns one number per row."""
    device = torch.device("cpu")
    # A metric may warn that all labels or outputs are equal, as they may be in a trial.
    with ignore_warnings():
        is_function = not is_torchmetric(metric)
        per_row = is_function and is_per_row(metric(match_shapes(output, label), label), len(label))
        state, merged = (make_own_state(metric, per_row, device) for _ in range(2))
        state.update(output, label)
        # Several states, to run the rules for merging too.
        for _ in range(3):
            merged.merge_state(state.metric_state)
        return merged.compute(), per_row


def higher_is_better(metric: Any) -> bool | None:
    better = getattr(metric, "higher_is_better", None)
    return None if better is None else bool(better)


def is_higher_better(name: str, own: Sequence[OwnMetric]) -> bool | None:
    """Returns whether a larger value is better; None if unknown."""
    for metric in own:
        if metric.name == name:
            return metric.higher_is_better
    return METRICS[name].higher_is_better


def find_metric(entry: str, metrics: Sequence[str]) -> str | None:
    """Returns the metric of a history entry "<metric>" or "<metric>_<label>"; None for a loss."""
    fitting = [name for name in metrics if entry == name or entry.startswith(f"{name}_")]
    return max(fitting, key=len, default=None)
