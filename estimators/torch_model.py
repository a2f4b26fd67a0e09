"""The fitted stages: a trained network as a Spark ML Transformer."""

from __future__ import annotations

import copy
from typing import Any, TypeVar

from pyspark.ml import Model
from pyspark.ml.linalg import VectorUDT
from pyspark.ml.util import MLReadable, MLReader, MLWritable
from pyspark.sql import Column, DataFrame
from pyspark.sql.types import ArrayType, DataType, DoubleType, StructField, StructType
from torch import nn

from ringspark.estimators.params import _ClassifierParams, _InputParams, set_params
from ringspark.estimators.persistence import WEIGHTS_FOLDER, StageReader, StageWriter
from ringspark.estimators.predict import (
    Kind,
    Predictor,
    class_columns,
    count_classes,
    input_expression,
    prediction_expression,
    prediction_type,
)
from ringspark.estimators.schema import check_inputs
from ringspark.estimators.summary import TrainingSummary
from ringspark.estimators.training.checkpoint import load_checkpoint, read_info
from ringspark.models import ModelSpec
from ringspark.pipelines import storage
from ringspark.pipelines.columns import quote

M = TypeVar("M", bound="TorchModel")

# Holds the three results of a classifier until they have columns of their own.
_RESULT = "__ringspark_result"


class TorchModel(_InputParams, Model, MLWritable, MLReadable["TorchModel"]):
    """A trained network. `transform` adds `predictionCol`; all other columns pass through.

    The prediction is a double where the network gives one number per row, else an array of doubles.
    Made by an estimator's `fit`, or by `load`.
    """

    _kind: Kind = "regression"

    def __init__(self, **params: Any) -> None:
        super().__init__()
        self._weights_uri: str | None = None
        self._output_width: int | None = None
        self._summary: TrainingSummary | None = None
        set_params(self, params)

    @property
    def hasSummary(self) -> bool:
        return self._summary is not None

    @property
    def summary(self) -> TrainingSummary:
        """The history and the counts of the training."""
        assert self._summary is not None, "a model without summary was never fitted"
        return self._summary

    def module(self) -> nn.Module:
        """The trained network as a plain `nn.Module` on the CPU, in eval mode; a new one each time."""
        model = self.getModel()
        module = model.build() if isinstance(model, ModelSpec) else copy.deepcopy(model)
        load_checkpoint(self._weights(), module)
        return module.eval()

    def write(self) -> StageWriter:
        """A writer; its `overwrite()` replaces what is there."""
        extra = {
            "output_width": self._output_width,
            "summary": self._summary.to_json() if self._summary else None,
        }
        return StageWriter(self, self._weights(), extra)

    @classmethod
    def read(cls: type[M]) -> MLReader[M]:
        return StageReader(cls)

    def _transform(self, dataset: DataFrame) -> DataFrame:
        check_inputs(dataset.schema, self.inputColumns())
        expression = prediction_expression(self._predictor(), self._expressions(dataset))
        return dataset.withColumn(self.getPredictionCol(), expression)

    def transformSchema(self, schema: StructType) -> StructType:
        """The schema that `transform` gives for `schema`."""
        check_inputs(schema, self.inputColumns())
        is_scalar = prediction_type(self._kind, self._output_width) == "double"
        data_type: DataType = DoubleType() if is_scalar else ArrayType(DoubleType())
        return StructType([*schema.fields, StructField(self.getPredictionCol(), data_type)])

    def _expressions(self, dataset: DataFrame) -> list[Column]:
        """The input columns as Python gets them."""
        schema = dataset.schema
        return [input_expression(dataset[quote(name)], schema[name].dataType) for name in self.inputColumns()]

    def _predictor(self) -> Predictor:
        model = self.getModel()
        weights_uri = self._weights()
        if self.getInferenceBatchSize() < 1:
            raise ValueError(f"inferenceBatchSize must be at least 1, got {self.getInferenceBatchSize()}")
        return Predictor(
            model=model.to_json() if isinstance(model, ModelSpec) else model,
            weights_uri=weights_uri,
            weights_id=read_info(weights_uri).checkpoint_id,
            kind=self._kind,
            output_width=self._output_width,
            batch_size=self.getInferenceBatchSize(),
            input_columns=tuple(self.inputColumns()),
        )

    def _weights(self) -> str:
        if self._weights_uri is None:
            raise ValueError(
                f"{type(self).__name__} has no weights; get one from an estimator's fit or from load()"
            )
        return self._weights_uri

    def _set_trained(
        self: M, weights_uri: str, output_width: int | None, summary: TrainingSummary | None
    ) -> M:
        self._weights_uri = weights_uri
        self._output_width = output_width
        self._summary = summary
        return self

    def _restore(self, uri: str, description: dict[str, Any]) -> None:
        """Called by the reader with the folder that the stage was saved in."""
        weights_uri = storage.join(uri, WEIGHTS_FOLDER)
        # Now rather than in the first task: the folder may be damaged.
        read_info(weights_uri)
        summary = description["summary"]
        self._set_trained(
            weights_uri,
            description["output_width"],
            TrainingSummary.from_json(summary) if summary else None,
        )


class TorchRegressionModel(TorchModel):
    """Made by `TorchRegressor`; the prediction is a double, or an array of doubles for array labels."""


class TorchClassificationModel(TorchModel, _ClassifierParams):
    """Made by `TorchClassifier`; adds `rawPredictionCol`, `probabilityCol` and `predictionCol`.

    The first two are vectors, as Spark's evaluators take them; an empty name leaves a column out.
    """

    _kind: Kind = "classification"

    @property
    def numClasses(self) -> int:
        """Classes that the network tells apart."""
        return count_classes(self._output_width)

    def _transform(self, dataset: DataFrame) -> DataFrame:
        check_inputs(dataset.schema, self.inputColumns())
        expression = prediction_expression(self._predictor(), self._expressions(dataset))
        result = dataset.withColumn(_RESULT, expression)
        names = (self.getRawPredictionCol(), self.getProbabilityCol(), self.getPredictionCol())
        for name, column in zip(names, class_columns(_RESULT, self._output_width), strict=True):
            if name:
                result = result.withColumn(name, column)
        return result.drop(_RESULT)

    def transformSchema(self, schema: StructType) -> StructType:
        """The schema that `transform` gives for `schema`."""
        check_inputs(schema, self.inputColumns())
        fields = list(schema.fields)
        for name in (self.getRawPredictionCol(), self.getProbabilityCol()):
            if name:
                fields.append(StructField(name, VectorUDT()))
        fields.append(StructField(self.getPredictionCol(), DoubleType()))
        return StructType(fields)
