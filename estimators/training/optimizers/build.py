"""Builds a module's optimizer from a name or a user's factory."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from inspect import Parameter, signature
from typing import Any

import torch
from torch import nn

from ringspark.estimators.parallel.layout import layout_of
from ringspark.estimators.training.optimizers.groups import group_parameters
from ringspark.estimators.training.optimizers.registry import make_optimizer


def build_optimizer(
    spec: str | Callable[[Any], torch.optim.Optimizer],
    module: nn.Module,
    groups: object,
    learning_rate: float,
    weight_decay: float,
) -> torch.optim.Optimizer:
    """Builds the optimizer of a module in its final form. Runs on every rank.

    Args:
        spec: A name of `OPTIMIZERS`, or a factory. A factory gets the list of trainable parameters
            (without `groups`) or the list of group dicts, and sets rates and decays itself if a
            group does not.
        groups: See `check_groups`; empty or None for one group of all parameters.

    Raises:
        ValueError: The name is unknown, the groups do not fit the module, or the factory returned
            something other than an optimizer of this module's trainable parameters.
    """
    trainable: list[Any] = [p for p in module.parameters() if p.requires_grad]
    if not trainable and layout_of(module) is not None:
        # A stage of a pipeline whose parameters are all frozen. Torch takes no empty list of parameters.
        trainable = [{"params": []}]
    if isinstance(spec, str):
        grouped = group_parameters(module, groups, learning_rate, weight_decay) if groups else None
        return make_optimizer(spec, grouped or trainable, learning_rate, weight_decay)
    optimizer = spec(group_parameters(module, groups) if groups else list(trainable))
    _check_made(optimizer, module)
    return optimizer


def _check_made(optimizer: object, module: nn.Module) -> None:
    if not isinstance(optimizer, torch.optim.Optimizer):
        raise ValueError(
            f"optimizer must return a torch.optim.Optimizer, got {type(optimizer).__name__}; "
            "give a callable (parameters) -> optimizer"
        )
    closure = signature(optimizer.step).parameters.get("closure")
    if closure is not None and closure.default is Parameter.empty:
        raise ValueError(
            f"optimizer {type(optimizer).__name__} evaluates the loss several times a step, which the "
            "training loop does not offer; take one whose step() needs no closure"
        )
    names = {p: name for name, p in module.named_parameters() if p.requires_grad}
    held = [p for group in optimizer.param_groups for p in group["params"]]
    if len(set(held)) < len(held):
        raise ValueError("optimizer holds a parameter twice; give each parameter to one group")
    if any(p not in names for p in held) or (not held and layout_of(module) is None):
        raise ValueError(
            f"optimizer must hold the parameters it was given, the {len(names)} trainable ones of "
            f"{type(module).__name__}, got others or none; make it from its argument"
        )
    missing = [name for p, name in names.items() if p not in set(held)]
    if missing:
        warnings.warn(
            f"optimizer leaves out {len(missing)} trainable parameters; they are not trained: {missing[:10]}",
            stacklevel=3,
        )
