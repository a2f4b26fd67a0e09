"""Spark ML stages that train PyTorch networks: `fit` on a gang of workers, `transform` in batches.

The stages are imported on first use, so that a machine without Spark can train from shards, and plan
memory, with the rest of the package.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from ringspark.estimators.failures import WorkerError
from ringspark.estimators.memory import MemoryPlan, plan_memory
from ringspark.estimators.training.callbacks import Callback, TrainingState

if TYPE_CHECKING:
    from ringspark.estimators.failures import TrainingCancelledError
    from ringspark.estimators.torch_estimator import TorchClassifier, TorchEstimator, TorchRegressor
    from ringspark.estimators.torch_model import (
        TorchClassificationModel,
        TorchModel,
        TorchRegressionModel,
    )

_NEEDS_SPARK = {
    "TorchClassifier": "torch_estimator",
    "TorchEstimator": "torch_estimator",
    "TorchRegressor": "torch_estimator",
    "TorchClassificationModel": "torch_model",
    "TorchModel": "torch_model",
    "TorchRegressionModel": "torch_model",
    "TrainingCancelledError": "failures",
}

__all__ = [
    "Callback",
    "MemoryPlan",
    "TorchClassificationModel",
    "TorchClassifier",
    "TorchEstimator",
    "TorchModel",
    "TorchRegressionModel",
    "TorchRegressor",
    "TrainingCancelledError",
    "TrainingState",
    "WorkerError",
    "plan_memory",
]


def __getattr__(name: str) -> Any:
    if name not in _NEEDS_SPARK:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_NEEDS_SPARK[name]}"), name)


def __dir__() -> list[str]:
    return __all__
