"""Finds the user's objects for a replay; no run holds them in a form that loads without running its code."""

from __future__ import annotations

from importlib import import_module
from typing import Any

import torch

from ringspark.estimators.stages.model_params import _EstimatorParams
from ringspark.estimators.stages.to_config import config_of
from ringspark.estimators.training.settings.config import TrainConfig, UserObjects
from ringspark.models import ModelSpec


def find_objects(model: Any, config: TrainConfig) -> UserObjects:
    """Returns the objects in `model`, see `verify_run`. Raises ValueError if the run needs a model."""
    if callable(model) and not isinstance(model, torch.nn.Module | _EstimatorParams):
        model = model()
    if isinstance(model, _EstimatorParams):
        return config_of(model, config.task, config.label_columns)[1]
    if isinstance(model, ModelSpec):
        model = None
    objects = model if isinstance(model, UserObjects) else UserObjects(module=model)
    if config.model is None and objects.module is None:
        raise ValueError(
            "the run trained a module of the user, and a run holds no code; give model=, or --model "
            "package.module:name, a module, an estimator, or a function that returns one"
        )
    return objects


def import_model(path: str) -> Any:
    """Imports "package.module:name". Raises ValueError if there is no such name."""
    module, colon, name = path.partition(":")
    if not colon or not module or not name:
        raise ValueError(f"--model must be package.module:name, got {path!r}; name an object of a module")
    try:
        return getattr(import_module(module), name)
    except (ImportError, AttributeError) as error:
        raise ValueError(
            f"--model {path!r} cannot be imported: {error}; put its folder on PYTHONPATH"
        ) from error
