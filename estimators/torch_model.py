"""The fitted stages: `TorchModel`, the classification model and the regression model."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import replace
from typing import Any, Literal

from pyspark.ml.linalg import DenseVector
from pyspark.sql import Column, DataFrame
from pyspark.sql import functions as F
from pyspark.sql.types import ArrayType, DataType, IntegralType, StringType, StructField, StructType

from ringspark.estimators.columns.expressions import class_name
from ringspark.estimators.columns.inputs import class_number, label_expression, source_columns
from ringspark.estimators.columns.schema import find_field
from ringspark.estimators.inference.evaluate import Evaluation
from ringspark.estimators.inference.results import Classes, Results, Values
from ringspark.estimators.stages.model_params import check_free, check_thresholds
from ringspark.estimators.stages.params import ClassifierParams, EvaluatedParams, RegressionModelParams
from ringspark.estimators.techniques import FUNCTIONS
from ringspark.estimators.trained_model import TorchModel
from ringspark.estimators.training.objective.metrics import Task, check_metrics
from ringspark.estimators.training.objective.own_metrics import check_own_tasks, name_metrics
from ringspark.pipelines.columns import check_frame, is_case_sensitive, quote

__all__ = ["TorchClassificationModel", "TorchModel", "TorchRegressionModel"]

# The two columns that `evaluate` compares.
_OUTPUT, _LABEL = "__ringspark_output", "__ringspark_label"


class _EvaluatedModel(TorchModel, EvaluatedParams):
    """A model with one output, for a classification or a regression."""

    _task: Task

    def evaluate(self, dataset: DataFrame) -> dict[str, float]:
        """Returns the `metrics` over the rows of a DataFrame, by name. Runs one Spark job.

        Rows that `handleInvalid` leaves without a prediction do not count. The predicted class has the
        largest logit; `thresholds` are ignored. Each row has weight 1.
        """
        check_frame(dataset, "evaluate")
        exact = is_case_sensitive(dataset.sparkSession)
        bound = self._bind(dataset.schema, exact)
        metrics = name_metrics(self.getMetrics())
        if not metrics:
            raise ValueError("evaluate needs metrics; fit with metrics=[...], or set them by setMetrics")
        own = {name: metric for name, metric in metrics.items() if not isinstance(metric, str)}
        check_own_tasks(own, self._task)
        check_metrics([name for name in metrics if name not in own], self._task, len(self._quantiles))
        label, numbers = self._label(dataset.schema, exact)
        evaluation = self._evaluation(label, list(metrics)).with_own(own)
        labelled = dataset.withColumn(_LABEL, numbers)
        scored = self._add_results(labelled, bound, [_OUTPUT], Values(shapes=self._output_shapes))
        return evaluation.over(scored.select(_OUTPUT, _LABEL))

    def report(
        self,
        path: str | os.PathLike[str],
        data: DataFrame | None = None,
        *,
        attributions: Literal["permutation", "captum", "none"] = "permutation",
        rows: int = 10_000,
        seed: int = 0,
    ) -> None:
        """Writes one HTML page about the training to the file `path` on any store.

        With `data`, the page adds predictions for these rows: confusion matrix, ROC curve and calibration, or
        predictions against labels; and the importance of each feature. Runs one Spark job, which brings a
        sample to the driver. Each row has weight 1.

        Args:
            path: File to write; without a scheme, on the local disk.
            data: Labeled rows that the model was not trained on.
            attributions: "permutation", the loss of quality when a feature is shuffled; "captum", integrated
                gradients, which needs `pip install 'ringspark[attribution]'`; or "none".
            rows: Maximum rows of the sample; fewer if the rows are as large as images.
            seed: Seed of the sample and of the shuffles.
        """
        if data is None:
            super().report(path)
            return
        report = FUNCTIONS["held_out_report"](attributions, rows, seed)
        summary = self.summary
        check_frame(data, "report")
        exact = is_case_sensitive(data.sparkSession)
        bound = self._bind(data.schema, exact)
        label, numbers = self._label(data.schema, exact)
        columns = self._python_columns(bound)
        predictor = self._predictor([item.feed for item in bound])
        report.write(
            summary,
            path,
            data,
            columns,
            numbers,
            predictor=replace(predictor, keeps_rows=len(columns) > len(bound), use_gpu=False),
            inputs=self._inputs,
            fields=source_columns(self._inputs, self.inputColumns(), data.schema, exact),
            evaluation=self._evaluation(label),
            classes=self._classes_or_none(),
            names=self._labels,
        )

    def _label(self, schema: StructType, exact: bool) -> tuple[StructField, Column]:
        label = find_field(self.getLabelCol(), "labelCol", schema, exact)
        if self._labels:
            # With its text, by which an error names a class that the model does not know.
            return label, F.struct(class_number(label, self._labels), F.col(quote(label.name)).cast("string"))
        return label, label_expression(label, self._label_fields)

    def _evaluation(self, label: StructField, names: Sequence[str] = ()) -> Evaluation:
        (width,) = Values(shapes=self._output_shapes).widths
        return Evaluation(
            names=tuple(names),
            width=width,
            label=label.name,
            num_classes=max(2, width) if self._task == "classification" else None,
            ignored=self._ignored_label,
            output_shape=self._output_shapes[0],
            whole_labels=is_whole(label.dataType) or bool(self._labels),
            quantiles=self._quantiles,
        )

    @property
    def _quantiles(self) -> tuple[float, ...]:
        """Probabilities of the quantiles that the network returns; empty if it returns none."""
        return ()

    def _classes_or_none(self) -> Classes | None:
        return None


class TorchRegressionModel(_EvaluatedModel, RegressionModelParams):
    """Made by `TorchRegressor`; the prediction is a double, or an array of doubles for array labels.

    With `quantiles`, the prediction is the quantile nearest to the median, the lower one of two, and
    `quantilesCol` has all. With `intervals`, `intervalCol` has prediction intervals.
    """

    _task = "regression"

    def transformSchema(self, schema: StructType) -> StructType:
        found = super().transformSchema(schema)
        if self.getIntervals() is not None:
            found = FUNCTIONS["interval_fields"](self, found)
        return found

    def _transform(self, dataset: DataFrame) -> DataFrame:
        if self.getIntervals() is None:
            return super()._transform(dataset)
        found: DataFrame = FUNCTIONS["add_intervals"](self, dataset, super()._transform)
        return found

    @property
    def _quantiles(self) -> tuple[float, ...]:
        return tuple(self.getQuantiles() or ())

    def _outputs(self) -> tuple[list[str], Results]:
        if not self._quantiles and self.getIntervals() is None:
            return super()._outputs()
        found: tuple[list[str], Results] = FUNCTIONS["quantile_outputs"](self)
        return found

    def predict(self, features: Any) -> float | list[float]:
        """Returns the prediction for one feature vector without a Spark job."""
        values: list[float] = self._outputs_of(features)[0].tolist()
        return values[0] if len(values) == 1 else values


class TorchClassificationModel(_EvaluatedModel, ClassifierParams):
    """Made by `TorchClassifier`; adds `rawPredictionCol`, `probabilityCol` and `predictionCol`.

    The first two are vectors, as Spark's evaluators take them; an empty name omits a column.
    """

    _task = "classification"

    def predict(self, features: Any) -> float:
        """Returns the class of one feature vector without a Spark job."""
        return float(self._classes().decide(self._outputs_of(features))[0])

    def predictRaw(self, features: Any) -> DenseVector:
        """Returns the raw predictions for one feature vector."""
        return DenseVector(self._classes().raw(self._outputs_of(features))[0])

    def predictProbability(self, features: Any) -> DenseVector:
        """Returns the class probabilities for one feature vector."""
        return DenseVector(self._classes().probabilities(self._outputs_of(features))[0])

    @property
    def numClasses(self) -> int:
        return self._classes().num_classes

    @property
    def labels(self) -> list[str]:
        """The class names, ordered by class number; empty if the labels were numbers."""
        return list(self._labels)

    def transformSchema(self, schema: StructType) -> StructType:
        return StructType([*super().transformSchema(schema).fields, *self._class_name_fields(schema)])

    def _transform(self, dataset: DataFrame) -> DataFrame:
        check_frame(dataset, "transform")
        fields = self._class_name_fields(dataset.schema, is_case_sensitive(dataset.sparkSession))
        result = super()._transform(dataset)
        (prediction,) = self.predictionColumns(1)
        for field in fields:
            result = result.withColumn(field.name, class_name(F.col(quote(prediction)), self._labels))
        return result

    def _class_name_fields(self, schema: StructType, exact: bool = False) -> list[StructField]:
        name = self.getPredictedLabelCol()
        # The names are made from the column of class numbers.
        if not self._labels or not name or not self.getPredictionCol():
            return []
        check_free(schema, [name, *(given for given in self._all_outputs()[0] if given)], exact)
        return [StructField(name, StringType())]

    def _classes_or_none(self) -> Classes | None:
        return self._classes()

    def _classes(self) -> Classes:
        if len(self._output_shapes) != 1:
            raise ValueError(
                f"a classification model has one output of logits, the network has {len(self._output_shapes)}"
                "; fit this network with TorchEstimator"
            )
        (width,) = Values(shapes=self._output_shapes).widths
        thresholds = self.getThresholds()
        return Classes(width=width, thresholds=tuple(thresholds) if thresholds is not None else None)

    def _outputs(self) -> tuple[list[str], Results]:
        classes = self._classes()
        if classes.thresholds is not None:
            check_thresholds(classes.thresholds, classes.num_classes)
        prediction = self.predictionColumns(1)
        return [self.getRawPredictionCol(), self.getProbabilityCol(), *prediction], classes


def is_whole(data_type: DataType) -> bool:
    """Whether a column holds integers or arrays of integers, which a network gets as int64."""
    while isinstance(data_type, ArrayType):
        data_type = data_type.elementType
    return isinstance(data_type, IntegralType)
