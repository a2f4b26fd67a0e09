"""Spark ML stages that train PyTorch networks: `fit` on a gang of workers, `transform` in batches.

Each name is imported when it is asked for: a machine without Spark trains from shards and plans memory, and a
job prints its help before torch is there.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from ringspark.estimators.failures import TrainingCancelledError, WorkerError
    from ringspark.estimators.memory import MemoryPlan, plan_memory
    from ringspark.estimators.scaling import (
        ParallelismPlan,
        ScalingPlan,
        fit_scaling,
        plan_parallelism,
        plan_scaling,
    )
    from ringspark.estimators.sequence_windows import SequenceWindows
    from ringspark.estimators.torch_estimator import TorchClassifier, TorchEstimator, TorchRegressor
    from ringspark.estimators.torch_model import (
        TorchClassificationModel,
        TorchModel,
        TorchRegressionModel,
    )
    from ringspark.estimators.training.callbacks import Callback, TrainingState

_MODULES = {
    "Callback": "training.callbacks",
    "MemoryPlan": "memory",
    "ParallelismPlan": "scaling",
    "ScalingPlan": "scaling",
    "SequenceWindows": "sequence_windows",
    "TorchClassifier": "torch_estimator",
    "TorchEstimator": "torch_estimator",
    "TorchRegressor": "torch_estimator",
    "TorchClassificationModel": "torch_model",
    "TorchModel": "torch_model",
    "TorchRegressionModel": "torch_model",
    "TrainingCancelledError": "failures",
    "TrainingState": "training.callbacks",
    "WorkerError": "failures",
    "fit_scaling": "scaling",
    "plan_memory": "memory",
    "plan_parallelism": "scaling",
    "plan_scaling": "scaling",
}

__all__ = [
    "Callback",
    "MemoryPlan",
    "ParallelismPlan",
    "ScalingPlan",
    "SequenceWindows",
    "TorchClassificationModel",
    "TorchClassifier",
    "TorchEstimator",
    "TorchModel",
    "TorchRegressionModel",
    "TorchRegressor",
    "TrainingCancelledError",
    "TrainingState",
    "WorkerError",
    "fit_scaling",
    "plan_memory",
    "plan_parallelism",
    "plan_scaling",
]


def __getattr__(name: str) -> Any:
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_MODULES[name]}"), name)


def __dir__() -> list[str]:
    return __all__
