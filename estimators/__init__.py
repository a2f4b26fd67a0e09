"""Spark ML stages that train PyTorch networks: `fit` on a gang of workers, `transform` in batches."""

from ringspark.estimators.launch.gang import WorkerError
from ringspark.estimators.torch_estimator import TorchClassifier, TorchEstimator, TorchRegressor
from ringspark.estimators.torch_model import TorchClassificationModel, TorchModel, TorchRegressionModel
from ringspark.estimators.training.callbacks import Callback, TrainingState

__all__ = [
    "Callback",
    "TorchClassificationModel",
    "TorchClassifier",
    "TorchEstimator",
    "TorchModel",
    "TorchRegressionModel",
    "TorchRegressor",
    "TrainingState",
    "WorkerError",
]
