"""Spark ML stages that train PyTorch networks: `fit` on a gang of workers, `transform` in batches.

Each name is imported when it is asked for: a machine without Spark trains from shards and plans memory, and a
job prints its help before torch is there.
"""

from typing import TYPE_CHECKING

from ringspark.estimators.lazy_imports import make_getattr

if TYPE_CHECKING:
    from ringspark.estimators.failures import TrainingCancelledError, WorkerError
    from ringspark.estimators.memory import MemoryPlan, plan_memory
    from ringspark.estimators.torch_estimator import TorchClassifier, TorchEstimator, TorchRegressor
    from ringspark.estimators.torch_model import (
        TorchClassificationModel,
        TorchModel,
        TorchRegressionModel,
    )
    from ringspark.estimators.training.callbacks import Callback, TrainingState
    from ringspark.extras.planning import (
        ParallelismPlan,
        ScalingPlan,
        fit_scaling,
        plan_parallelism,
        plan_scaling,
    )
    from ringspark.extras.windows.sequence_windows import SequenceWindows

_PATHS = {
    "Callback": "ringspark.estimators.training.callbacks:Callback",
    "MemoryPlan": "ringspark.estimators.memory:MemoryPlan",
    "ParallelismPlan": "ringspark.extras.planning:ParallelismPlan",
    "ScalingPlan": "ringspark.extras.planning:ScalingPlan",
    "SequenceWindows": "ringspark.extras.windows.sequence_windows:SequenceWindows",
    "TorchClassifier": "ringspark.estimators.torch_estimator:TorchClassifier",
    "TorchEstimator": "ringspark.estimators.torch_estimator:TorchEstimator",
    "TorchRegressor": "ringspark.estimators.torch_estimator:TorchRegressor",
    "TorchClassificationModel": "ringspark.estimators.torch_model:TorchClassificationModel",
    "TorchModel": "ringspark.estimators.torch_model:TorchModel",
    "TorchRegressionModel": "ringspark.estimators.torch_model:TorchRegressionModel",
    "TrainingCancelledError": "ringspark.estimators.failures:TrainingCancelledError",
    "TrainingState": "ringspark.estimators.training.callbacks:TrainingState",
    "WorkerError": "ringspark.estimators.failures:WorkerError",
    "fit_scaling": "ringspark.extras.planning:fit_scaling",
    "plan_memory": "ringspark.estimators.memory:plan_memory",
    "plan_parallelism": "ringspark.extras.planning:plan_parallelism",
    "plan_scaling": "ringspark.extras.planning:plan_scaling",
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


__getattr__ = make_getattr(__name__, _PATHS)


def __dir__() -> list[str]:
    return __all__
