"""The registry of metrics: torchmetrics' by name, with the arguments that each takes.

With two classes, precision, recall, f1, auroc and average_precision are for class 1, as in scikit-learn. With
more classes they are averages over the classes (macro); only "f1_weighted", which Spark calls f1, weights a
class by its number of rows. "auroc" and "average_precision" need all rows at once: every rank holds 8 bytes
for each row and class of the whole split. "temperature" is the number by which logits must be divided for the
smallest log loss: above 1, the network is too sure of itself.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from importlib import import_module
from importlib.util import find_spec
from typing import Any, Literal

import torch

from ringspark.estimators.names import check_name
from ringspark.estimators.training.objective.deviance import POWERS, find_power
from ringspark.estimators.training.objective.metric_formulas import (
    R2,
    Curve,
    MeanDeviance,
    Temperature,
    auroc,
    average_precision,
    balanced_accuracy,
    curve_mean,
)

Task = Literal["classification", "regression"]


@dataclass(frozen=True, kw_only=True)
class MetricInfo:
    """One entry of the registry.

    Attributes:
        make: Number of classes -> a metric with torchmetrics' protocol.
        higher_is_better: None if neither a higher nor a lower value is better.
        takes: Arguments of its `update`.
        finish: Computes the value of a merged metric.
    """

    make: Callable[[int], Any]
    task: Task = "classification"
    higher_is_better: bool | None = True
    takes: Literal[
        "values",
        "relative_errors",
        "counts",
        "probabilities",
        "log_losses",
        "logits",
        "pinball_losses",
        "covered",
    ] = "counts"
    finish: Callable[[Any], torch.Tensor] = lambda metric: metric.compute()


def _torchmetric(class_name: str, **options: Any) -> Any:
    # With torch.distributed as the collective, the metric itself would synchronize.
    return getattr(import_module("torchmetrics"), class_name)(sync_on_compute=False, **options)


def _of_classes(
    family: str, num_classes: int, average: str | None = "macro", as_binary: bool = True, **options: Any
) -> Any:
    classification = import_module("torchmetrics.classification")
    # The driver has already checked the labels.
    shared = {"sync_on_compute": False, "validate_args": False, **options}
    if num_classes == 2 and as_binary:
        return getattr(classification, f"Binary{family}")(**shared)
    return getattr(classification, f"Multiclass{family}")(num_classes=num_classes, average=average, **shared)


def _curve(family: str, curve: Curve, needs_negatives: bool) -> MetricInfo:
    return MetricInfo(
        make=partial(_of_classes, family, average=None),
        takes="probabilities",
        finish=partial(curve_mean, curve=curve, needs_negatives=needs_negatives),
    )


def _error(class_name: str, **options: Any) -> MetricInfo:
    return MetricInfo(
        task="regression",
        higher_is_better=False,
        make=lambda num_classes: _torchmetric(class_name, **options),
        takes="values",
    )


def _mean(task: Task, takes: Any, higher_is_better: bool | None = False) -> MetricInfo:
    return MetricInfo(
        task=task,
        higher_is_better=higher_is_better,
        make=lambda num_classes: _torchmetric("MeanMetric", nan_strategy="disable"),
        takes=takes,
    )


def _deviance(power: float) -> MetricInfo:
    return MetricInfo(
        task="regression",
        higher_is_better=False,
        make=lambda num_classes: MeanDeviance(power),
        takes="values",
    )


class _Metrics(dict[str, MetricInfo]):
    """The metrics by name, also "tweedie_deviance_1.7" for any power between 1 and 2."""

    def __missing__(self, name: str) -> MetricInfo:
        power = find_power(name.replace("_deviance", "", 1)) if "_deviance" in name else None
        if power is None:
            check_name("metrics", name, self, otherwise="")
            raise KeyError(name)
        return _deviance(power)


METRICS: dict[str, MetricInfo] = _Metrics()
METRICS |= {
    "accuracy": MetricInfo(make=partial(_of_classes, "Accuracy", average="micro")),
    "balanced_accuracy": MetricInfo(
        make=partial(_of_classes, "StatScores", average=None, as_binary=False), finish=balanced_accuracy
    ),
    "precision": MetricInfo(make=partial(_of_classes, "Precision")),
    "recall": MetricInfo(make=partial(_of_classes, "Recall")),
    "f1": MetricInfo(make=partial(_of_classes, "F1Score")),
    "f1_weighted": MetricInfo(make=partial(_of_classes, "F1Score", average="weighted", as_binary=False)),
    "auroc": _curve("AUROC", auroc, needs_negatives=True),
    "average_precision": _curve("AveragePrecision", average_precision, needs_negatives=False),
    "log_loss": _mean("classification", "log_losses"),
    "temperature": MetricInfo(make=lambda num_classes: Temperature(), takes="logits", higher_is_better=False),
    "mse": _error("MeanSquaredError"),
    "rmse": _error("MeanSquaredError", squared=False),
    "mae": _error("MeanAbsoluteError"),
    # torchmetrics' own replaces labels below 1.17e-6 by that number.
    "mape": _mean("regression", "relative_errors"),
    "r2": MetricInfo(task="regression", make=lambda num_classes: R2(), takes="values"),
    **{f"{family}_deviance": _deviance(power) for family, power in POWERS.items()},
    "pinball_loss": _mean("regression", "pinball_losses"),
    # Share of the labels between the lowest and the highest quantile.
    "coverage": _mean("regression", "covered", higher_is_better=None),
}

_NEEDED_QUANTILES = {"pinball_loss": 1, "coverage": 2}


def metric_info(name: str) -> MetricInfo:
    """Returns the registry's entry; raises ValueError if the name is unknown."""
    return METRICS[name]


def check_metrics(names: Sequence[str], task: str, num_quantiles: int = 0) -> None:
    """Raises ValueError if a name is unknown, given twice or for another task, or torchmetrics is missing.

    `task` is "classification", "regression", or "any", which accepts both.
    `num_quantiles` is the number of predicted quantiles.
    """
    for name in names:
        info = metric_info(name)
        if task not in ("any", info.task):
            fitting = sorted(n for n, other in METRICS.items() if other.task == task)
            raise ValueError(f"metrics of a {task} must be among {fitting}, got {name!r} of {info.task}")
        if list(names).count(name) > 1:
            raise ValueError(f"metrics must differ from each other, got {name!r} more than once; drop one")
        if num_quantiles < (least := _NEEDED_QUANTILES.get(name, 0)):
            raise ValueError(
                f"the metric {name!r} needs at least {least} quantiles, and the network predicts "
                f"{num_quantiles}; set quantiles of TorchRegressor, or drop the metric"
            )
    if names and find_spec("torchmetrics") is None:
        raise ValueError(
            "metrics need torchmetrics, which is not installed; pip install torchmetrics, or leave "
            "metrics empty"
        )
