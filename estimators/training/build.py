"""Builds a module and its optimizer from the settings, on the driver for its checks and on every rank."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from inspect import Parameter, signature
from typing import Any

import torch
from torch import nn

from ringspark.estimators.parallel.layout import layout_of
from ringspark.estimators.techniques import first_made, techniques_of
from ringspark.estimators.training.finetuning.freezing import tune
from ringspark.estimators.training.optimizers.groups import group_parameters
from ringspark.estimators.training.optimizers.registry import make_optimizer
from ringspark.estimators.training.settings.config import TrainConfig, UserObjects
from ringspark.models import ModelSpec
from ringspark.models.meta_device import build_on_meta, copy_to_meta


def build_module(config: TrainConfig, objects: UserObjects) -> nn.Module:
    """Returns the network to train: the module of `objects` itself, or a new network of the `ModelSpec`."""
    if config.model is not None:
        module = ModelSpec.from_json(config.model).build()
    elif objects.module is not None:
        module = objects.module
    else:
        raise ValueError("model is not set; give a ModelSpec or an nn.Module")
    return tune(module, config.freeze, config.lora)


def build_empty(config: TrainConfig, objects: UserObjects) -> nn.Module:
    """Returns the network to train on the meta device; `objects` keeps its module."""
    if config.model is not None:
        module = build_on_meta(ModelSpec.from_json(config.model).build)
    else:
        module = copy_to_meta(objects.module)
    return tune(module, config.freeze, config.lora)


def build_configured_optimizer(
    config: TrainConfig, objects: UserObjects, module: nn.Module
) -> torch.optim.Optimizer:
    made = first_made(each.make_optimizer(config, objects, module) for each in techniques_of(config))
    return made or build_optimizer(
        objects.optimizer or config.optimizer,
        module,
        config.parameter_groups,
        config.learning_rate,
        config.weight_decay,
    )


def build_optimizer(
    spec: str | Callable[[Any], torch.optim.Optimizer],
    module: nn.Module,
    groups: object,
    learning_rate: float,
    weight_decay: float,
) -> torch.optim.Optimizer:
    """Builds the optimizer of a module that is already frozen and sharded as configured.

    `spec` is a name in `OPTIMIZERS`, or a function that makes an optimizer from the list of trainable
    parameters. With `groups` (see `check_groups`) the function gets a list of group dicts instead. A dict may
    lack the learning rate and the weight decay; the function then chooses them.
    """
    trainable: list[Any] = [p for p in module.parameters() if p.requires_grad]
    if not trainable and layout_of(module) is not None:
        # A pipeline stage whose parameters are all frozen. torch accepts no empty list of parameters.
        trainable = [{"params": []}]
    if isinstance(spec, str):
        grouped = group_parameters(module, groups, learning_rate, weight_decay) if groups else None
        return make_optimizer(spec, grouped or trainable, learning_rate, weight_decay)
    optimizer = spec(group_parameters(module, groups) if groups else list(trainable))
    check_held(optimizer, module)
    return optimizer


def check_kind(optimizer: object) -> None:
    """Raises ValueError unless the training loop can call the optimizer's `step`."""
    if not isinstance(optimizer, torch.optim.Optimizer):
        raise ValueError(
            f"optimizer must return a torch.optim.Optimizer, got {type(optimizer).__name__}; "
            "give a callable (parameters) -> optimizer"
        )
    closure = signature(optimizer.step).parameters.get("closure")
    if closure is not None and closure.default is Parameter.empty:
        raise ValueError(
            f"optimizer {type(optimizer).__name__} evaluates the loss several times per step, which the "
            "training loop does not offer; use one whose step() needs no closure"
        )


def check_held(optimizer: Any, module: nn.Module) -> None:
    """Raises ValueError like `check_kind`, or if the optimizer holds other parameters than the module's."""
    check_kind(optimizer)
    names = {p: name for name, p in module.named_parameters() if p.requires_grad}
    held = [p for group in optimizer.param_groups for p in group["params"]]
    if len(set(held)) < len(held):
        raise ValueError("optimizer holds a parameter twice; give each parameter to one group")
    if any(p not in names for p in held) or (not held and layout_of(module) is None):
        raise ValueError(
            f"the function given as optimizer gets the {len(names)} trainable parameters of "
            f"{type(module).__name__}, but its optimizer holds other parameters or none; make the optimizer "
            "from the function's argument"
        )
    missing = [name for p, name in names.items() if p not in set(held)]
    if missing:
        warnings.warn(
            f"optimizer leaves out {len(missing)} trainable parameters; they are not trained: {missing[:10]}",
            stacklevel=3,
        )
