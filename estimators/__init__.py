"""Spark ML stages that train PyTorch networks: `fit` on a gang of workers, `transform` in batches."""

from ringspark.estimators.launch.gang import WorkerError
from ringspark.estimators.torch_estimator import TorchClassifier, TorchEstimator, TorchRegressor
from ringspark.estimators.torch_model import TorchClassificationModel, TorchModel, TorchRegressionModel

__all__ = [
    "TorchClassificationModel",
    "TorchClassifier",
    "TorchEstimator",
    "TorchModel",
    "TorchRegressionModel",
    "TorchRegressor",
    "WorkerError",
]
