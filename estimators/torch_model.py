"""The fitted stages: a trained network as a Spark ML Transformer."""

from __future__ import annotations

import operator
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import reduce
from typing import Any, TypeVar

from pyspark.ml import Model
from pyspark.ml.linalg import DenseVector
from pyspark.ml.util import MLReadable, MLReader, MLWritable
from pyspark.sql import Column, DataFrame
from pyspark.sql import functions as F
from pyspark.sql.types import StructField, StructType
from torch import nn

from ringspark.estimators import user_code
from ringspark.estimators.columns.inputs import (
    BoundInput,
    ModelInput,
    bind,
    label_expression,
    model_inputs,
    source_columns,
)
from ringspark.estimators.columns.schema import field_named
from ringspark.estimators.inference.evaluate import Evaluation
from ringspark.estimators.inference.export import ExportFormat, export_module
from ringspark.estimators.inference.one_row import num_features, one_row
from ringspark.estimators.inference.predict import (
    Predictor,
    cached_module,
    prediction_expression,
    takes_vectors,
)
from ringspark.estimators.inference.results import Classes, Results, Values
from ringspark.estimators.stages.declared import set_params
from ringspark.estimators.stages.held_weights import HeldWeights
from ringspark.estimators.stages.model_params import (
    _ClassifierParams,
    _EvaluatedParams,
    _ModelParams,
    check_free,
    check_thresholds,
)
from ringspark.estimators.stages.persistence import WEIGHTS_FOLDER, Description, StageReader, StageWriter
from ringspark.estimators.stages.storage_root import find_session
from ringspark.estimators.stages.summary import TrainingSummary
from ringspark.estimators.training.checkpoint.weights import map_checkpoint
from ringspark.estimators.training.feed import Array
from ringspark.estimators.training.objective.metrics import Task, check_metrics
from ringspark.models import ModelSpec
from ringspark.models.skeleton import build_skeleton, skeleton
from ringspark.pipelines import storage
from ringspark.pipelines.columns import Column as ShardColumn
from ringspark.pipelines.columns import check_frame, is_case_sensitive
from ringspark.pipelines.typed_json import added

M = TypeVar("M", bound="TorchModel")

Shape = tuple[int, ...]

# Name of the temporary column for Python's result, whose parts then become columns.
_RESULT = "__ringspark_result"
# Names of the two columns that `evaluate` compares.
_OUTPUT, _LABEL = "__ringspark_output", "__ringspark_label"


@dataclass(frozen=True, kw_only=True)
class ModelDescription(Description):
    """The description of a model that is saved beside its weights; the attributes are the model's own."""

    inputs: tuple[ModelInput, ...]
    output_shapes: tuple[Shape, ...]
    summary: TrainingSummary | None
    ignored_label: int | None = added(None)


class TorchModel(_ModelParams, Model, MLWritable, MLReadable["TorchModel"]):
    """A trained network. `transform` adds `predictionCol`; all other columns pass through.

    The prediction is a double where the network gives one number per row, else an array of doubles; a
    network with several outputs has one column for each, `predictionCols`.
    Made by an estimator's `fit`, or by `load`.
    """

    _description = ModelDescription

    def __init__(self, **params: Any) -> None:
        super().__init__()
        self._weights: HeldWeights | None = None
        self._inputs: tuple[ModelInput, ...] = ()
        self._output_shapes: tuple[Shape, ...] = ()
        self._summary: TrainingSummary | None = None
        self._ignored_label: int | None = None
        set_params(self, params)

    @property
    def hasSummary(self) -> bool:
        return self._summary is not None

    @property
    def summary(self) -> TrainingSummary:
        """The history and the counts of the training."""
        if self._summary is None:
            raise RuntimeError(f"No training summary available for this {type(self).__name__}")
        return self._summary

    @property
    def numFeatures(self) -> int:
        """Number of features of the one vector that the network was trained on; -1 if it takes others."""
        return num_features(self._inputs)

    def module(self) -> nn.Module:
        """Returns the trained network as a new plain `nn.Module` on the CPU, in eval mode."""
        model = self.getModel()
        module = build_skeleton(model) if isinstance(model, ModelSpec) else skeleton(model)
        weights = self._trained()
        map_checkpoint(weights.uri, module, expected_id=weights.info().checkpoint_id)
        return module.eval()

    def export(self, path: str, format: ExportFormat = "torch.export") -> None:
        """Writes the trained network, for any number of rows, to the file `path` on any store.

        Args:
            path: Path or URI of the file to write; without a scheme, one on this machine's disk.
            format: Format of the file. `torch.export.load` reads "torch.export", ONNX runtimes read "onnx";
                "onnx" needs `pip install 'ringspark[onnx]'`.

        Raises:
            ValueError: The format is unknown or not installed, or the network cannot be traced.
        """
        export_module(self.module(), self._inputs, self.inputColumns(), path, format)

    def write(self) -> StageWriter:
        """Returns a writer; its `overwrite()` replaces an existing stage."""
        return StageWriter(
            self,
            self._trained(),
            {
                "inputs": [item.to_json() for item in self._inputs],
                "output_shapes": [list(shape) for shape in self._output_shapes],
                "summary": self._summary.to_json() if self._summary else None,
                "ignored_label": self._ignored_label,
            },
        )

    @classmethod
    def read(cls: type[M]) -> MLReader[M]:
        return StageReader(cls)

    def transformSchema(self, schema: StructType) -> StructType:
        """Returns the schema of `transform`'s result for a DataFrame with `schema`."""
        session = find_session()
        exact = session is not None and is_case_sensitive(session)
        self._bind(schema, exact)
        names, results = self._outputs()
        added = [StructField(n, t) for n, t in zip(names, results.types, strict=True) if n]
        check_free(schema, [field.name for field in added], exact)
        return StructType([*schema.fields, *added])

    def _transform(self, dataset: DataFrame) -> DataFrame:
        check_frame(dataset, "transform")
        exact = is_case_sensitive(dataset.sparkSession)
        bound = self._bind(dataset.schema, exact)
        names, results = self._outputs()
        check_free(dataset.schema, [name for name in names if name], exact)
        return self._applied(dataset, bound, names, results)

    def _applied(
        self, dataset: DataFrame, bound: Sequence[BoundInput], names: Sequence[str], results: Results
    ) -> DataFrame:
        """Returns the DataFrame with the results in columns of these names, "" for one left out."""
        handling = self.getHandleInvalid()
        valid = reduce(operator.and_, [item.valid for item in bound])
        columns = [item.values for item in bound]
        if handling == "skip":
            dataset = dataset.where(valid)
        elif handling == "keep":
            columns = [*(_where_valid(item, valid) for item in bound), valid]
        # A step that works row by row. Straight from Parquet, Spark 4.3 would hand over columns, but by a
        # converter that knows no vectors, not even those that only pass by (UNSUPPORTED_DATATYPE).
        dataset = dataset.select("*", F.explode(F.array(F.lit(0))).alias(_RESULT)).drop(_RESULT)
        with_vectors = takes_vectors(dataset.sparkSession)
        predictor = replace(
            self._predictor([item.feed for item in bound], results), gives_vectors=with_vectors
        )
        # The struct gets one name before its parts, so that Spark computes the function once. It is exploded,
        # because Spark would copy a plain expression into a filter on a part, and run the network twice.
        result = dataset.select(
            "*", F.explode(F.array(prediction_expression(predictor, columns))).alias(_RESULT)
        )
        parts = results.columns(_RESULT, with_vectors=with_vectors)
        named = [part.alias(name) for name, part in zip(names, parts, strict=True) if name]
        return result.select("*", *named).drop(_RESULT)

    def _bind(self, schema: StructType, exact: bool) -> list[BoundInput]:
        """Returns the model's inputs, matched with the columns of a schema."""
        self._trained()  # refuses a model that was never fitted
        fields = source_columns(self._inputs, self.inputColumns(), schema, exact)
        return [bind(item, field) for item, field in zip(self._inputs, fields, strict=True)]

    def _outputs(self) -> tuple[list[str], Results]:
        """Returns the names of the columns that `transform` adds, "" for one left out, and their contents."""
        values = Values(shapes=self._output_shapes)
        return self.predictionColumns(len(self._output_shapes)), values

    def _predictor(self, feeds: Sequence[Any] = (), results: Results | None = None) -> Predictor:
        model, weights = self.getModel(), self._trained()
        return Predictor(
            model=model.to_json() if isinstance(model, ModelSpec) else user_code.dumps(skeleton(model)),
            weights_uri=weights.uri,
            weights_id=weights.info().checkpoint_id,
            feeds=tuple(feeds),
            results=results or self._outputs()[1],
            output_widths=tuple(Values(shapes=self._output_shapes).widths),
            batch_size=self.getInferenceBatchSize(),
            use_gpu=self.getInferenceUseGpu(),
            keeps_rows=self.getHandleInvalid() == "keep",
        )

    def _trained(self) -> HeldWeights:
        if self._weights is None:
            raise ValueError(
                f"{type(self).__name__} has no weights; get one from an estimator's fit or from load()"
            )
        return self._weights

    def _set_trained(
        self: M,
        weights_uri: str,
        output_shapes: Sequence[Shape],
        summary: TrainingSummary | None,
        *,
        columns: Sequence[ShardColumn] = (),
        input_columns: Sequence[str] = (),
        ignored_label: int | None = None,
    ) -> M:
        """Makes this the model of a training.

        Args:
            weights_uri: Folder of the checkpoint.
            output_shapes: Shape of one row, for each output.
            summary: Summary of the training.
            columns: All columns of the shards; without them, inputs take any numbers.
            input_columns: Names of the model's inputs in the shards; if empty, the model's own.
            ignored_label: Label of rows that do not count; see `Head.ignored`.
        """
        self._weights = HeldWeights(weights_uri)
        # Held from here on, because a save over one of the folder's parents may remove it.
        self._weights.hold()
        self._inputs = model_inputs(columns, input_columns or self.inputColumns())
        self._output_shapes = tuple(tuple(shape) for shape in output_shapes)
        self._summary = summary
        self._ignored_label = ignored_label
        return self

    def _restore(self, uri: str, description: ModelDescription) -> None:
        """Restores a saved stage; the reader calls it with the stage's folder."""
        weights = HeldWeights(storage.join(uri, WEIGHTS_FOLDER))
        # Held now instead of in the first task, because the folder may be damaged, and because a pipeline
        # that is saved over the folder it was loaded from removes it before it asks for the weights.
        weights.hold()
        self._weights = weights
        self._inputs = description.inputs
        self._output_shapes = description.output_shapes
        self._summary = description.summary
        self._ignored_label = description.ignored_label

    def _outputs_of(self, features: Any) -> Array:
        """Returns the raw outputs for the features of one row, (1, values) float64."""
        predictor = self._predictor()
        row = one_row(self._inputs, self.inputColumns(), features)
        return predictor.predict(cached_module(predictor), [row])


class _EvaluatedModel(TorchModel, _EvaluatedParams):
    """A model of one output, whose task says what its labels are."""

    _task: Task

    def evaluate(self, dataset: DataFrame) -> dict[str, float]:
        """Returns the `metrics` of the training over the rows of a DataFrame, by name. Runs one Spark job.

        Rows that `handleInvalid` leaves without a prediction do not count. As in the training, a class is the
        one of the largest logit: `thresholds` do not count, and each row weighs 1.

        Raises:
            ValueError: There are no `metrics`, or the labels do not fit the predictions.
        """
        check_frame(dataset, "evaluate")
        exact = is_case_sensitive(dataset.sparkSession)
        bound = self._bind(dataset.schema, exact)
        names = tuple(self.getMetrics())
        if not names:
            raise ValueError("evaluate needs metrics; fit with metrics=[...], or set them by setMetrics")
        check_metrics(names, self._task)
        label = field_named(self.getLabelCol(), "labelCol", dataset.schema, exact)
        outputs = Values(shapes=self._output_shapes)
        (width,) = outputs.widths
        evaluation = Evaluation(
            names=names,
            width=width,
            label=label.name,
            num_classes=max(2, width) if self._task == "classification" else None,
            ignored=self._ignored_label,
        )
        labelled = dataset.withColumn(_LABEL, label_expression(label))
        return evaluation.over(self._applied(labelled, bound, [_OUTPUT], outputs).select(_OUTPUT, _LABEL))


class TorchRegressionModel(_EvaluatedModel):
    """Made by `TorchRegressor`; the prediction is a double, or an array of doubles for array labels."""

    _task = "regression"

    def predict(self, features: Any) -> float | list[float]:
        """Returns the prediction for one vector, as `transform` gives it; starts no Spark job.

        Raises:
            ValueError: The network takes something else than one vector, or the numbers do not fit it.
        """
        values: list[float] = self._outputs_of(features)[0].tolist()
        return values[0] if len(values) == 1 else values


class TorchClassificationModel(_EvaluatedModel, _ClassifierParams):
    """Made by `TorchClassifier`; adds `rawPredictionCol`, `probabilityCol` and `predictionCol`.

    The first two are vectors, as Spark's evaluators take them; an empty name leaves a column out.
    """

    _task = "classification"

    def predict(self, features: Any) -> float:
        """Returns the class of one vector; starts no Spark job. See `TorchRegressionModel.predict`."""
        return float(self._classes().decide(self._outputs_of(features))[0])

    def predictRaw(self, features: Any) -> DenseVector:
        """Returns the raw predictions for one vector."""
        return DenseVector(self._classes().raw(self._outputs_of(features))[0])

    def predictProbability(self, features: Any) -> DenseVector:
        """Returns the classes' probabilities for one vector."""
        return DenseVector(self._classes().probabilities(self._outputs_of(features))[0])

    @property
    def numClasses(self) -> int:
        """Number of classes that the network tells apart."""
        return self._classes().num_classes

    def _classes(self) -> Classes:
        if len(self._output_shapes) != 1:
            raise ValueError(
                f"a classification model has one output of logits, the network has {len(self._output_shapes)}"
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


def _where_valid(item: BoundInput, valid: Column) -> Column:
    """Returns the input's values, with values that Python can handle in the rows that are not valid."""
    values = F.when(valid, item.values)
    return values if item.filler is None else F.coalesce(values, item.filler)
