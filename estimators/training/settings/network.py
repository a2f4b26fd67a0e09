"""Settings of the network: model, loss, metrics, transforms and fine-tuning."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Annotated, Any

import torch
from annotated_types import Ge, Gt, Le, Lt
from torch import nn

from ringspark.estimators.options.checked import Finite, WrongTypeError
from ringspark.estimators.options.finetuning import LoRA, Pretrained
from ringspark.estimators.training.objective.losses import check_loss_name
from ringspark.estimators.training.objective.own_metrics import name_metrics
from ringspark.estimators.training.settings.choices import InitialState
from ringspark.estimators.training.settings.data import without_secrets
from ringspark.estimators.training.settings.setting import Section, setting
from ringspark.models import ModelSpec
from ringspark.models.adapters import adapt_network


def _model(value: Any) -> ModelSpec | nn.Module:
    value = adapt_network(value)
    if isinstance(value, torch.jit.ScriptModule):
        raise WrongTypeError(
            "model must be a ModelSpec or an nn.Module that can be copied, got a ScriptModule; give the "
            "nn.Module it was made from"
        )
    if isinstance(value, ModelSpec | nn.Module):
        return value
    if isinstance(value, str):
        return ModelSpec(value)
    raise WrongTypeError(
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
    raise WrongTypeError(f"loss must be a name, a callable or a list of them, got {type(value).__name__}")


def _metrics(value: Any) -> list[Any]:
    metrics = list(value) if isinstance(value, list | tuple) else [value]
    name_metrics(metrics)
    return metrics


def _transform(setting: str) -> Callable[[Any], Any]:
    def convert(value: Any) -> Any:
        if isinstance(value, type) or not callable(value):
            given = f"the class {value.__name__}" if isinstance(value, type) else type(value).__name__
            raise WrongTypeError(
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
        raise WrongTypeError(
            f"{setting} must be a fitted model or the path of a saved one, got {type(value).__name__}; of a "
            "PipelineModel give the fitted stage, such as model.stages[-1]"
        )

    return convert


def _teacher(value: Any) -> Any:
    predicts = any(hasattr(value, name) for name in ("predict", "predict_proba"))
    if not isinstance(value, type) and (predicts or (hasattr(value, "uid") and hasattr(value, "transform"))):
        return value
    return _fitted_model("teacher")(value)


def _patterns(value: Any) -> list[str]:
    patterns = [value] if isinstance(value, str) else value
    if isinstance(patterns, Sequence) and all(isinstance(p, str) and p for p in patterns):
        return list(patterns)
    raise ValueError(f"freeze must be a name pattern or a list of patterns ('encoder.*'), got {value!r}")


@dataclass(frozen=True, kw_only=True)
class Network(Section):
    GROUP = "network"

    freeze: tuple[str, ...] = setting(
        (),
        "patterns over names of parameters that are not trained, such as 'encoder.*'",
        convert=_patterns,
        without_effect=(lambda given: given["lora"] is not None, "lora freezes all but its adapter"),
    )
    lora: LoRA | None = setting(None, "a LoRA: low-rank adapters; only they are trained")
    pretrained: Pretrained | None = setting(None, "initial weights: a Pretrained, or a URI")
    temperature: Annotated[float, Gt(0), Finite] = setting(
        2.0,
        "divisor of the logits when the network is compared with the teacher",
        without_effect=(lambda given: given["teacher"] is None, "teacher is not set"),
    )
    alpha: Annotated[float, Ge(0), Le(1)] = setting(
        0.5,
        "weight of the distillation loss; the label's loss has the weight 1 - alpha",
        without_effect=(lambda given: given["teacher"] is None, "teacher is not set"),
    )
    ema_decay: Annotated[float, Gt(0), Lt(1)] | None = setting(
        None, "decay per step of a moving average of the weights, which becomes the model; unset: no average"
    )


@dataclass(frozen=True, kw_only=True)
class Model(Section):
    """The network of an estimator and of its model."""

    GROUP = "network"
    ON_DRIVER = True

    model: Any = setting(
        None,
        "a ModelSpec or an nn.Module instance; unset: an ensemble of networks for the table's columns",
        field="model",
        convert=_model,
    )
    transform_in_prediction: Any = setting(
        None,
        "callable (*inputs) -> inputs for held-out and predicted rows; saved with the model",
        convert=_transform("transformInPrediction"),
    )


@dataclass(frozen=True, kw_only=True)
class Metrics(Section):
    """Metrics of training and evaluation."""

    GROUP = "network"
    ON_DRIVER = True

    metrics: tuple[Any, ...] = setting(
        (),
        "metrics of every epoch: names, torchmetrics objects, functions, and {name: any of these}",
        field="metrics",
        convert=_metrics,
    )


@dataclass(frozen=True, kw_only=True)
class Objects(Section):
    """Settings with Python objects. `TrainConfig` has their names, or `UserObjects` has the objects."""

    GROUP = "network"
    ON_DRIVER = True

    loss: Any = setting(
        "auto",
        "'auto', a name, an nn loss, or a callable (output, label) or (module, inputs, outputs, labels) -> "
        "(rows,); a list for several labels",
        field="losses",
        convert=_losses,
    )
    transform_batch: Any = setting(
        None,
        "callable for training rows: (*inputs) -> inputs, or (*inputs, labels=...) -> (inputs, labels)",
        convert=_transform("transformBatch"),
    )
    initial_model: Any = setting(
        None,
        "fitted model or path of a saved one; fit starts from its weights, vocabularies and classes",
        convert=_fitted_model("initialModel"),
    )
    initial_state: InitialState = setting(
        "weights",
        "what fit takes from initialModel: 'weights', or 'optimizer' for weights and optimizer state",
        without_effect=(lambda given: given["initialModel"] is None, "initialModel is not set"),
    )
    teacher: Any = setting(
        None,
        "fitted model (ringspark, scikit-learn or Spark ML), path of a saved ringspark model, or column of a "
        "model's outputs; the network also learns these outputs (distillation)",
        convert=_teacher,
    )
