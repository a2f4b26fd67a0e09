"""Spark ML stages that train PyTorch networks: `fit` on a gang of workers, `transform` in batches.

Each name is imported on first use: a machine without Spark trains from shards and plans memory, and a job
prints its help before torch is imported.
"""

from typing import TYPE_CHECKING

from ringspark.estimators.lazy_imports import make_getattr

if TYPE_CHECKING:
    from ringspark.estimators.failures import TrainingCancelledError, WorkerError
    from ringspark.estimators.memory import MemoryPlan, plan_memory
    from ringspark.estimators.options.compression import (
        BF16,
        FP16,
        QSGD,
        GradiVeQ,
        PowerSGD,
        RandomK,
        Sign,
        Sparsify,
        TopK,
        Uncompressed,
    )
    from ringspark.estimators.options.finetuning import LoRA, Pretrained
    from ringspark.estimators.options.mesh import Mesh, Pipeline
    from ringspark.estimators.options.scaling import ScaleLearningRate
    from ringspark.estimators.options.sync import (
        AllReduce,
        DiLoCo,
        ElasticAveraging,
        Hogwild,
        LocalSGD,
        ParameterServer,
        Zero,
    )
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
    "AllReduce": "ringspark.estimators.options.sync:AllReduce",
    "BF16": "ringspark.estimators.options.compression:BF16",
    "Callback": "ringspark.estimators.training.callbacks:Callback",
    "DiLoCo": "ringspark.estimators.options.sync:DiLoCo",
    "ElasticAveraging": "ringspark.estimators.options.sync:ElasticAveraging",
    "FP16": "ringspark.estimators.options.compression:FP16",
    "GradiVeQ": "ringspark.estimators.options.compression:GradiVeQ",
    "Hogwild": "ringspark.estimators.options.sync:Hogwild",
    "LoRA": "ringspark.estimators.options.finetuning:LoRA",
    "LocalSGD": "ringspark.estimators.options.sync:LocalSGD",
    "MemoryPlan": "ringspark.estimators.memory:MemoryPlan",
    "Mesh": "ringspark.estimators.options.mesh:Mesh",
    "ParallelismPlan": "ringspark.extras.planning:ParallelismPlan",
    "ParameterServer": "ringspark.estimators.options.sync:ParameterServer",
    "Pipeline": "ringspark.estimators.options.mesh:Pipeline",
    "PowerSGD": "ringspark.estimators.options.compression:PowerSGD",
    "Pretrained": "ringspark.estimators.options.finetuning:Pretrained",
    "QSGD": "ringspark.estimators.options.compression:QSGD",
    "RandomK": "ringspark.estimators.options.compression:RandomK",
    "ScaleLearningRate": "ringspark.estimators.options.scaling:ScaleLearningRate",
    "ScalingPlan": "ringspark.extras.planning:ScalingPlan",
    "SequenceWindows": "ringspark.extras.windows.sequence_windows:SequenceWindows",
    "Sign": "ringspark.estimators.options.compression:Sign",
    "Sparsify": "ringspark.estimators.options.compression:Sparsify",
    "TopK": "ringspark.estimators.options.compression:TopK",
    "TorchClassificationModel": "ringspark.estimators.torch_model:TorchClassificationModel",
    "TorchClassifier": "ringspark.estimators.torch_estimator:TorchClassifier",
    "TorchEstimator": "ringspark.estimators.torch_estimator:TorchEstimator",
    "TorchModel": "ringspark.estimators.torch_model:TorchModel",
    "TorchRegressionModel": "ringspark.estimators.torch_model:TorchRegressionModel",
    "TorchRegressor": "ringspark.estimators.torch_estimator:TorchRegressor",
    "TrainingCancelledError": "ringspark.estimators.failures:TrainingCancelledError",
    "TrainingState": "ringspark.estimators.training.callbacks:TrainingState",
    "Uncompressed": "ringspark.estimators.options.compression:Uncompressed",
    "WorkerError": "ringspark.estimators.failures:WorkerError",
    "Zero": "ringspark.estimators.options.sync:Zero",
    "fit_scaling": "ringspark.extras.planning:fit_scaling",
    "plan_memory": "ringspark.estimators.memory:plan_memory",
    "plan_parallelism": "ringspark.extras.planning:plan_parallelism",
    "plan_scaling": "ringspark.extras.planning:plan_scaling",
}

__all__ = [
    "BF16",
    "FP16",
    "QSGD",
    "AllReduce",
    "Callback",
    "DiLoCo",
    "ElasticAveraging",
    "GradiVeQ",
    "Hogwild",
    "LoRA",
    "LocalSGD",
    "MemoryPlan",
    "Mesh",
    "ParallelismPlan",
    "ParameterServer",
    "Pipeline",
    "PowerSGD",
    "Pretrained",
    "RandomK",
    "ScaleLearningRate",
    "ScalingPlan",
    "SequenceWindows",
    "Sign",
    "Sparsify",
    "TopK",
    "TorchClassificationModel",
    "TorchClassifier",
    "TorchEstimator",
    "TorchModel",
    "TorchRegressionModel",
    "TorchRegressor",
    "TrainingCancelledError",
    "TrainingState",
    "Uncompressed",
    "WorkerError",
    "Zero",
    "fit_scaling",
    "plan_memory",
    "plan_parallelism",
    "plan_scaling",
]


__getattr__ = make_getattr(__name__, _PATHS)


def __dir__() -> list[str]:
    return __all__
