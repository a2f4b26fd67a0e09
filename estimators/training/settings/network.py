"""Settings of the network: model, loss, metrics, transforms and fine-tuning."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, get_args

import torch
from torch import nn

from ringspark.estimators.options.base import ValueRange, above_0_and_finite, one_of
from ringspark.estimators.options.finetuning import LoRA, Pretrained
from ringspark.estimators.training.objective.losses import check_loss_name
from ringspark.estimators.training.objective.own_metrics import name_metrics
from ringspark.estimators.training.settings.choices import InitialState
from ringspark.estimators.training.settings.data import without_secrets
from ringspark.estimators.training.settings.declaration import Setting
from ringspark.models import ModelSpec
from ringspark.models.adapters import adapt_network


def _model(value: Any) -> ModelSpec | nn.Module:
    value = adapt_network(value)
    if isinstance(value, torch.jit.ScriptModule):
        raise TypeError(
            "model must be a ModelSpec or an nn.Module that can be copied, got a ScriptModule; give the "
            "nn.Module it was made from"
        )
    if isinstance(value, ModelSpec | nn.Module):
        return value
    if isinstance(value, str):
        return ModelSpec(value)
    raise TypeError(
        f"model must be a ModelSpec or an nn.Module, got {type(value).__name__}; "
        "pass an instance such as ModelSpec('mlp', {...}) or MyNet()"
    )


def _losses(value: Any) -> Any:
    if isinstance(value, list | tuple):
        return [_losses(entry) for entry in value]
    if isinstance(value, str):
        if value != "auto":
            check_loss_name(value)
        return value
    if callable(value):
        return value
    raise TypeError(f"loss must be a name, a callable or a list of them, got {type(value).__name__}")


def _metrics(value: Any) -> list[Any]:
    metrics = list(value) if isinstance(value, list | tuple) else [value]
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


def _fitted_model(setting: str) -> Callable[[Any], Any]:
    def convert(value: Any) -> Any:
        if isinstance(value, str):
            return without_secrets(value)
        if hasattr(value, "numFeatures") and hasattr(value, "_trained"):
            return value
        raise TypeError(
            f"{setting} must be a fitted model or the path of a saved one, got {type(value).__name__}; of a "
            "PipelineModel give the fitted stage, such as model.stages[-1]"
        )

    return convert


def _patterns(value: Any) -> list[str]:
    patterns = [value] if isinstance(value, str) else value
    if isinstance(patterns, Sequence) and all(isinstance(p, str) and p for p in patterns):
        return list(patterns)
    raise ValueError(f"freeze must be a name pattern or a list of patterns ('encoder.*'), got {value!r}")


MODEL = Setting[Any](
    name="model",
    field="model",
    words="the network: a ModelSpec or an nn.Module instance; unset: a pack of networks for a table",
    convert=_model,
)
LOSS = Setting[Any](
    name="loss",
    field="losses",
    words="'auto', a name, an nn loss, or a callable (output, label) or (module, inputs, outputs, labels) -> "
    "(rows,); a list for several labels",
    default="auto",
    convert=_losses,
)
LOSS_WEIGHTS = Setting[list[float] | None](
    name="lossWeights",
    field="loss_weights",
    words="weight of each label's loss in their sum; unset: 1 each",
    kind="numbers",
    accepts=ValueRange(
        lambda weights: all(weight >= 0 for weight in weights) and any(weights),
        lambda: "must not be negative and not all be 0",
    ),
)
METRICS = Setting[list[Any]](
    name="metrics",
    field="metrics",
    words="metrics of every epoch: names, torchmetrics objects, functions, and {name: any of these}",
    default=[],
    convert=_metrics,
)
TRANSFORM_BATCH = Setting[Any](
    name="transformBatch",
    words="changes training rows: (*inputs) -> inputs, or (*inputs, labels=...) -> (inputs, labels)",
    convert=_transform("transformBatch"),
)
TRANSFORM_IN_PREDICTION = Setting[Any](
    name="transformInPrediction",
    words="changes held-out and predicted rows: (*inputs) -> inputs; part of the model",
    convert=_transform("transformInPrediction"),
)
FREEZE = Setting[list[str]](
    name="freeze",
    field="freeze",
    words="patterns over names of parameters that are not trained, such as 'encoder.*'",
    default=[],
    convert=_patterns,
    without_effect=(lambda given: given["lora"] is not None, "lora freezes all but its adapter"),
)
LORA = Setting[LoRA | None](
    name="lora", field="lora", words="low-rank adapters, which alone are trained: a LoRA", options=LoRA
)
PRETRAINED = Setting[Pretrained | None](
    name="pretrained",
    field="pretrained",
    words="weights from which the training starts: a Pretrained, or a URI",
    options=Pretrained,
)
INITIAL_MODEL = Setting[Any](
    name="initialModel",
    words="fitted model or path of a saved one; fit starts from its weights, vocabularies and classes",
    convert=_fitted_model("initialModel"),
)
INITIAL_STATE = Setting[InitialState](
    name="initialState",
    words="what fit takes from initialModel: 'weights', or 'optimizer' for weights and optimizer state",
    default="weights",
    accepts=one_of(get_args(InitialState)),
    without_effect=(lambda given: given["initialModel"] is None, "initialModel is not set"),
)
TEACHER = Setting[Any](
    name="teacher",
    words="fitted model, or path of a saved one; the network also learns its outputs (distillation)",
    convert=_fitted_model("teacher"),
)
TEMPERATURE = Setting(
    name="temperature",
    field="temperature",
    words="divisor of the logits when the network is compared with the teacher",
    default=2.0,
    accepts=above_0_and_finite(),
    without_effect=(lambda given: given["teacher"] is None, "teacher is not set"),
)
ALPHA = Setting(
    name="alpha",
    field="alpha",
    words="weight of the distance from the teacher; the loss of the label has 1 - alpha",
    default=0.5,
    accepts=ValueRange(lambda alpha: 0 <= alpha <= 1, lambda: "must lie between 0 and 1"),
    without_effect=(lambda given: given["teacher"] is None, "teacher is not set"),
)
EMA_DECAY = Setting[float | None](
    name="emaDecay",
    field="ema_decay",
    words="decay per step of an average of the weights, which becomes the model; unset: no average",
    kind="float",
    accepts=ValueRange(lambda decay: 0 < decay < 1, lambda: "must lie between 0 and 1"),
)
