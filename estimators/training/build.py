"""Builds a module and its optimizer from the settings: on the driver for its checks, and on every rank."""

from __future__ import annotations

import torch
from torch import nn

from ringspark.estimators.training.finetuning.freezing import tuned
from ringspark.estimators.training.optimizers.build import build_optimizer
from ringspark.estimators.training.settings.config import TrainConfig, UserObjects
from ringspark.models import ModelSpec
from ringspark.models.meta_device import copy_module


def build_module(config: TrainConfig, objects: UserObjects) -> nn.Module:
    """Returns the untrained module, built from the spec or copied from the user's own.

    Its frozen parameters are frozen, and its adapters are there.
    """
    if config.model is not None:
        module = ModelSpec.from_json(config.model).build()
    elif objects.module is not None:
        module = copy_module(objects.module)
    else:
        raise ValueError("model is not set; give a ModelSpec or an nn.Module")
    return tuned(module, config)


def own_optimizer(config: TrainConfig, objects: UserObjects, module: nn.Module) -> torch.optim.Optimizer:
    """Returns the module's optimizer, by the config's settings and the user's factory if there is one."""
    return build_optimizer(
        objects.optimizer or config.optimizer,
        module,
        config.parameter_groups,
        config.learning_rate,
        config.weight_decay,
    )
