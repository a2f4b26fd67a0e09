"""The Params of the estimators and models, made from the declared settings; params.pyi lists the members."""

from __future__ import annotations

from pyspark.ml.param.shared import (
    HasFeaturesCol,
    HasInputCols,
    HasLabelCol,
    HasPredictionCol,
    HasProbabilityCol,
    HasRawPredictionCol,
    HasSeed,
    HasValidationIndicatorCol,
    HasWeightCol,
)

from ringspark.estimators.stages.declared import DeclaredParams, value_of, with_settings
from ringspark.estimators.training.settings.data import (
    Classification,
    Corrections,
    Inputs,
    Label,
    Labels,
    Offset,
    Prediction,
    Regression,
)
from ringspark.estimators.training.settings.network import Metrics, Model
from ringspark.estimators.training.settings.setting import settings_of
from ringspark.estimators.training.settings.table import SECTIONS
from ringspark.pipelines.kinds import Kind, kind_from_json

# Sections of models, and of estimators by their labels. TrainingParams has the other sections, and Model.
_OF_MODELS = (Model, Inputs, Prediction)
_OF_LABELS = (Label, Offset, Labels, Classification, Regression)
_OF_TRAINING = [section for section in SECTIONS if section not in (*_OF_MODELS[1:], *_OF_LABELS)]


@with_settings(*settings_of(*_OF_MODELS).values(), fixed=("model",))
class ModelSettings(DeclaredParams, HasFeaturesCol, HasInputCols, HasPredictionCol):
    """Settings that estimators and models share: the network, and the input and output columns."""


@with_settings(*settings_of(Offset).values())
class OffsetParams(DeclaredParams):
    """Settings of classifiers, regressors and their models."""


@with_settings(*settings_of(Label, Metrics).values())
class EvaluatedParams(OffsetParams, HasLabelCol):
    """Settings of models that can be evaluated."""


@with_settings(*settings_of(Classification).values())
class ClassifierParams(DeclaredParams, HasRawPredictionCol, HasProbabilityCol):
    """Settings of classifiers and their models."""


@with_settings(*settings_of(Regression).values())
class RegressorParams(DeclaredParams):
    """Settings of regressors."""


@with_settings(
    *settings_of(Regression, Corrections).values(), fixed=("quantiles", "intervals", "intervalCorrections")
)
class RegressionModelParams(DeclaredParams):
    """Settings of models of regressors."""


@with_settings(*settings_of(*_OF_TRAINING).values())
class TrainingParams(DeclaredParams, HasWeightCol, HasValidationIndicatorCol, HasSeed):
    """Settings of all estimators."""

    def getColumns(self) -> dict[str, Kind]:
        """Gets `columns`: the chosen column types by name."""
        return {name: kind_from_json(kind) for name, kind in (value_of(self, "columns") or {}).items()}


@with_settings(*settings_of(Label).values())
class LabelParams(DeclaredParams, HasLabelCol):
    """Settings of estimators with one label."""


@with_settings(*settings_of(Labels).values())
class MultiLabelParams(LabelParams):
    """Settings of estimators with several labels."""


class ClassifierKeywords:
    """Base class in which params.pyi declares the constructor of `TorchClassifier`, for editors."""


class RegressorKeywords:
    """Base class in which params.pyi declares the constructor of `TorchRegressor`."""


class EstimatorKeywords:
    """Base class in which params.pyi declares the constructor of `TorchEstimator`."""
