"""Settings whose values may be Python objects: model, loss, metrics, transforms, optimizer, callbacks."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
from torch import nn

from ringspark.estimators.names import check_name
from ringspark.estimators.training.callbacks import Callback
from ringspark.estimators.training.objective.losses import check_loss_name
from ringspark.estimators.training.objective.own_metrics import name_metrics
from ringspark.estimators.training.optimizers.groups import check_groups
from ringspark.estimators.training.optimizers.registry import OPTIMIZERS
from ringspark.estimators.training.optimizers.schedules import SCHEDULES
from ringspark.estimators.training.settings.declaration import Range, Setting
from ringspark.models import ModelSpec


def _model(value: Any) -> ModelSpec | nn.Module:
    if isinstance(value, torch.jit.ScriptModule):
        raise TypeError(
            "model must be a ModelSpec or an nn.Module that can be copied, got a ScriptModule; give the "
            "nn.Module it was made from"
        )
    if isinstance(value, ModelSpec | nn.Module):
        return value
    raise TypeError(
        f"model must be a ModelSpec or an nn.Module, got {type(value).__name__}; "
        "pass an instance such as ModelSpec('mlp', {...}) or MyNet()"
    )


def _losses(value: Any) -> Any:
    """Checks a name, an `nn` loss or a callable, or a list of them."""
    if isinstance(value, list | tuple):
        return [_losses(entry) for entry in value]
    if isinstance(value, str):
        if value != "auto":
            check_loss_name(value)
        return value
    if callable(value):
        return value
    raise TypeError(f"loss must be a name, a callable or a list of them, got {type(value).__name__}")


def _name_or_callable(setting: str, known: Iterable[str]) -> Callable[[Any], Any]:
    def convert(value: Any) -> Any:
        if isinstance(value, str):
            check_name(setting, value, known)
            return value
        if callable(value):
            return value
        raise TypeError(f"{setting} must be a name or a callable, got {type(value).__name__}")

    return convert


def _metrics(value: Any) -> list[Any]:
    is_one = isinstance(value, str | Mapping) or not isinstance(value, list | tuple)
    metrics = [value] if is_one else list(value)
    name_metrics(metrics)
    return metrics


def _transform(setting: str) -> Callable[[Any], Any]:
    def convert(value: Any) -> Any:
        if isinstance(value, type) or not callable(value):
            given = f"the class {value.__name__}" if isinstance(value, type) else type(value).__name__
            raise TypeError(
                f"{setting} must be a module or a function that is called as transform(*inputs), got {given}"
            )
        return value

    return convert


def _callbacks(value: Any) -> list[Callback]:
    callbacks = list(value) if isinstance(value, list | tuple) else [value]
    for callback in callbacks:
        if not isinstance(callback, Callback):
            given = callback.__name__ if isinstance(callback, type) else type(callback).__name__
            raise TypeError(
                f"callbacks must be instances of ringspark.estimators.Callback, got {given}; "
                "derive the class from it and pass an instance"
            )
    return callbacks


MODEL = Setting[Any](
    name="model",
    field="model",
    words="the network: a ModelSpec or an nn.Module instance",
    convert=_model,
)
LOSS = Setting[Any](
    name="loss",
    field="losses",
    words="loss by name (of this package or of torch.nn), an nn loss, or a callable (output, label) -> one "
    "value per row, which gets both as network and column give them; a list has one for each label; "
    "'auto': cross entropy for classes, mean squared error else",
    default="auto",
    convert=_losses,
)
LOSS_WEIGHTS = Setting[list[float] | None](
    name="lossWeights",
    field="loss_weights",
    words="factor of each label's loss in their sum; unset: 1 each",
    kind="numbers",
    accepts=Range(
        lambda weights: all(weight >= 0 for weight in weights) and any(weights),
        lambda: "must not be negative and not all be 0",
    ),
)
METRICS = Setting[list[Any]](
    name="metrics",
    field="metrics",
    words="metrics over the training and the held-out rows of every epoch: names, torchmetrics objects or "
    "classes, functions (outputs, labels) -> one number per row or one number, and {name: any of these}",
    default=[],
    convert=_metrics,
)
TRANSFORM_BATCH = Setting[Any](
    name="transformBatch",
    words="module or function that changes training rows on the workers: (*inputs) -> inputs, or, with a "
    "parameter of that name, (*inputs, labels=...) -> (inputs, labels)",
    convert=_transform("transformBatch"),
)
TRANSFORM_IN_PREDICTION = Setting[Any](
    name="transformInPrediction",
    words="module or function (*inputs) -> inputs for rows that are held out, predicted or evaluated; a part "
    "of the model",
    convert=_transform("transformInPrediction"),
)
OPTIMIZER = Setting[Any](
    name="optimizer",
    field="optimizer",
    words="optimizer by name, or a callable parameters -> torch.optim.Optimizer",
    default="adamw",
    convert=_name_or_callable("optimizer", OPTIMIZERS),
)
PARAMETER_GROUPS = Setting[list[dict[str, Any]]](
    name="parameterGroups",
    field="parameter_groups",
    words="settings for some parameters: a list of {'params': name pattern or patterns, 'learningRate': ..., "
    "'weightDecay': ...}; the first match counts",
    default=[],
    convert=lambda value: check_groups([value] if isinstance(value, dict) else value),
)
LR_SCHEDULE = Setting[Any](
    name="lrSchedule",
    field="lr_schedule",
    words="schedule by name, a callable (step, num_steps) -> factor on the learning rate, or a callable "
    "optimizer -> torch LRScheduler that is stepped after every optimizer step",
    default="constant",
    convert=_name_or_callable("lrSchedule", SCHEDULES),
)
CALLBACKS = Setting[list[Callback]](
    name="callbacks",
    words="instances of Callback, called on every worker at fixed points",
    default=[],
    convert=_callbacks,
)
