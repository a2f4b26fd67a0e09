"""`TorchModel`: a trained network as a Spark ML Transformer for any task."""

from __future__ import annotations

import os
import re
import warnings
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, TypeVar

import pandas as pd
from pyspark.ml import Model
from pyspark.ml.util import MLReadable, MLReader, MLWritable
from pyspark.sql import Column, DataFrame, SparkSession
from pyspark.sql import functions as F
from pyspark.sql.types import StructField, StructType
from torch import Tensor, nn

from ringspark.estimators import user_code
from ringspark.estimators.columns.expressions import all_of, make_struct, to_column
from ringspark.estimators.columns.inputs import (
    BoundInput,
    ModelInput,
    bind,
    layout_of_inputs,
    model_inputs,
    shared_columns,
    source_columns,
)
from ringspark.estimators.columns.schema import FieldIndex
from ringspark.estimators.inference.local_inputs import make_row, num_features
from ringspark.estimators.inference.pandas_batches import make_columns
from ringspark.estimators.inference.precision import PrecisionDifference
from ringspark.estimators.inference.predict import (
    CHUNK_BYTES,
    cached_module,
    prediction_expression,
    takes_vectors,
)
from ringspark.estimators.inference.predictor import Predictor
from ringspark.estimators.inference.results import Results, Values
from ringspark.estimators.names import first_line
from ringspark.estimators.stages.held_weights import HeldWeights
from ringspark.estimators.stages.model_params import _ModelParams, check_free
from ringspark.estimators.stages.persistence import WEIGHTS_FOLDER, Description, StageReader, StageWriter
from ringspark.estimators.stages.storage_root import find_session
from ringspark.estimators.stages.summary import TrainingSummary
from ringspark.estimators.techniques import FUNCTIONS
from ringspark.estimators.training.check.training import CheckedTraining
from ringspark.estimators.training.feed import Array
from ringspark.models import ModelSpec
from ringspark.models.meta_device import build_on_meta, copy_to_meta
from ringspark.models.program import NoProgramError, Program
from ringspark.pipelines import storage
from ringspark.pipelines.column_use import ColumnUse
from ringspark.pipelines.columns import Column as ShardColumn
from ringspark.pipelines.columns import check_batch, check_frame, is_case_sensitive
from ringspark.pipelines.kinds import Struct, Vocabulary
from ringspark.pipelines.local_python import choose_python

M = TypeVar("M", bound="TorchModel")


Shape = tuple[int, ...]

# Temporary column for Python's result.
_RESULT = "__ringspark_result"
# From this many inputs on, one struct holds all: Spark compares each argument of a function with all.
PACKED_INPUTS = 32

# Types in a schema's JSON that Spark 4.3's columnar converter does not pass to Python.
_ROW_TYPES = re.compile(':"(udt|interval|variant|geo)')


@dataclass(frozen=True, kw_only=True)
class ModelDescription(Description):
    """The content of a model's `ringspark.json`."""

    inputs: tuple[ModelInput, ...]
    output_shapes: tuple[Shape, ...]
    summary: TrainingSummary | None
    ignored_label: int | None = None
    labels: tuple[str, ...] = ()
    label_fields: tuple[tuple[str, ...], ...] = ()


class TorchModel(_ModelParams, Model, MLWritable, MLReadable["TorchModel"]):
    """A trained network, made by `fit` or `load`. `transform` adds `predictionCol`.

    The prediction is a double if the network returns one number per row, else an array of doubles. A network
    with several outputs has one column per output, `predictionCols`.
    """

    _description = ModelDescription
    without_label = False
    """Whether the model was trained without a label, so a fit with a label replaces its last layer."""

    def __init__(self, **params: Any) -> None:
        super().__init__()
        self._weights: HeldWeights | None = None
        self._inner: dict[Any, Any] = {}
        self._inputs: tuple[ModelInput, ...] = ()
        self._output_shapes: tuple[Shape, ...] = ()
        self._summary: TrainingSummary | None = None
        self._ignored_label: int | None = None
        self._labels: tuple[str, ...] = ()
        self._label_fields: tuple[tuple[str, ...], ...] = ()
        self.setParams(**params)

    @property
    def hasSummary(self) -> bool:
        return self._summary is not None

    @property
    def summary(self) -> TrainingSummary:
        if self._summary is None:
            raise RuntimeError(f"No training summary available for this {type(self).__name__}")
        return self._summary

    @property
    def numFeatures(self) -> int:
        """Number of features of the one input vector; -1 if the network takes other inputs."""
        return num_features(self._inputs)

    def _notebook_note(self) -> str:
        return "" if self._summary is None else self._summary.sentence

    def module(self) -> nn.Module:
        """Returns the trained network as a new `nn.Module` on the CPU, in eval mode.

        If it was saved without its class, this is a `Program`, which predicts and has the class's
        `state_dict()`.
        """
        model = self.getModel()
        module = build_on_meta(model.build) if isinstance(model, ModelSpec) else copy_to_meta(model)
        self._trained().map_into(module)
        return module.eval()

    def adapter(self) -> dict[str, Tensor]:
        """Returns the adapter weights that a fit with `lora` trained; the network's weights include them.

        Layer x has "x.lora_A", (rank, in), and "x.lora_B", (out, rank).
        """
        return self._trained().adapter()

    def export(self, path: str, format: str = "torch.export") -> None:
        """Writes the network, including `transformInPrediction`, to a file that takes any number of rows.

        Args:
            path: Path or URI of the file on any store; without a scheme, on the local disk. "triton" and
                "mlflow" write a folder.
            format: "torch.export" for `torch.export.load`, or a format of docs/serving.md: "onnx", "triton",
                "aotinductor", "executorch", or "mlflow", which also has the pre- and postprocessing.
        """
        FUNCTIONS["export_model"](self, path, format)

    def comparePrecision(self, dataset: DataFrame) -> PrecisionDifference:
        """Compares predictions in `inferencePrecision` with predictions in fp32. Runs one Spark job.

        `fit` does this with held-out rows, or a sample of the training rows: `summary.precision_difference`.
        """
        check_frame(dataset, "comparePrecision")
        bound = self._bind(dataset.schema, is_case_sensitive(dataset.sparkSession))
        columns = self._python_columns(bound)
        predictor = self._predictor([item.feed for item in bound])
        predictor = replace(predictor, keeps_rows=len(columns) > len(bound))
        found: PrecisionDifference = FUNCTIONS["compare_on_rows"](dataset, predictor, columns)
        return found

    def compare_inputs(self, dataset: DataFrame) -> pd.DataFrame:
        """Returns how far each column of a table is from its training rows, the largest drift first.

        Runs one Spark job. `extras.tables.drift.ColumnDrift` describes the columns of the result.
        """
        check_batch(dataset, "compare_inputs")
        bound = self._bind(dataset.schema, is_case_sensitive(dataset.sparkSession))
        found: pd.DataFrame = FUNCTIONS["compare_inputs"](dataset, self._inputs, to_column(bound[0].values))
        return found

    def contributionColumns(self) -> list[str]:
        """Returns the table's columns in the order of `contributionsCol`, which ends with the baseline."""
        own = self._outputs()[1]
        names: list[str] = FUNCTIONS["contributions"](own, own, self._inputs).kind.sources
        return names

    def report(self, path: str | os.PathLike[str]) -> None:
        """Writes one HTML page about the training to the file `path` on any store."""
        self.summary.report(path)

    def certificate(self, key: str | os.PathLike[str] | None = None) -> Any:
        """Returns the `Certificate` of a training with `certify=True`.

        `key` is a private EC key as a PEM file. It signs the run's folder in the format of OpenSSF
        model-signing.
        """
        return FUNCTIONS["certificate_of_run"](self.summary.run_uri, key)

    def removeRun(self) -> None:
        """Removes the folder of the training that made this model, after the model was saved.

        Load the saved model to predict. Without `runUri`, each fit leaves such a folder in `storageUri`.
        """
        run = self.summary.run_uri
        if self._trained().uri.startswith(f"{storage.normalize(run)}/") and not self._trained().is_saved:
            raise ValueError(f"the only weights of this model are in {run!r}; save the model first")
        FUNCTIONS["remove_run_of"](self.summary)

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
                "labels": list(self._labels),
                "label_fields": [list(path) for path in self._label_fields],
            },
            self._program,
        )

    def _program(self) -> Program | None:
        model = self.getModel()
        module = self.module()
        if isinstance(model, Program):
            assert isinstance(module, Program)
            return module
        try:
            prepare, inner = self.getTransformInPrediction(), self.getInnerCols() or ()
            program: Program = FUNCTIONS["record_module"](module, self._inputs, prepare, inner)
            return program
        except NoProgramError as error:
            warnings.warn(
                f"model {type(module).__name__} cannot be recorded as a program ({error}), so it is saved as "
                "pickled Python code, which loads only if RINGSPARK_ALLOW_PICKLE=1 is set; write its "
                "forward without branches on values, or give a ModelSpec",
                UserWarning,
                stacklevel=4,
            )
            return None

    @classmethod
    def read(cls: type[M]) -> MLReader[M]:
        return StageReader(cls)

    def transformSchema(self, schema: StructType) -> StructType:
        exact = (session := find_session()) is not None and is_case_sensitive(session)
        self._bind(schema, exact)
        names, results = self._all_outputs()
        added = [StructField(n, t) for n, t in zip(names, results.types, strict=True) if n]
        check_free(schema, [field.name for field in added], exact)
        return StructType([*schema.fields, *added])

    def _transform(self, dataset: DataFrame) -> DataFrame:
        check_frame(dataset, "transform")
        exact = is_case_sensitive(dataset.sparkSession)
        bound = self._bind(dataset.schema, exact)
        names, results = self._all_outputs()
        check_free(dataset.schema, [name for name in names if name], exact)
        return self._add_results(dataset, bound, names, results)

    def _add_results(
        self, dataset: DataFrame, bound: Sequence[BoundInput], names: Sequence[str], results: Results
    ) -> DataFrame:
        """Adds columns of these names to the DataFrame; "" omits a result."""
        judged = any(item.feed.judges for item in bound)
        skips = self.getHandleInvalid() == "skip"
        if skips:
            dataset = dataset.where(_valid(bound))
        choose_python(dataset.sparkSession)
        with_vectors = takes_vectors(dataset.sparkSession)
        packs = with_vectors and len(bound) >= PACKED_INPUTS
        columns = self._python_columns(bound, only_judged=skips, packs=packs)
        packed = {f"{_RESULT}_{number}": column for number, column in enumerate(columns) if packs}
        if packs:
            # Before the explode, which then copies one column instead of all inputs.
            dataset, columns = dataset.withColumns(packed), [F.col(name) for name in packed]
        if _ROW_TYPES.search(StructType([*dataset.schema, StructField("", results.spark_type)]).json()):
            # This explode works row by row. Straight from Parquet, Spark would use the converter, and fail on
            # a vector even in an unused column (UNSUPPORTED_DATATYPE).
            dataset = dataset.select("*", F.explode(F.array(F.lit(0))).alias(_RESULT)).drop(_RESULT)
        predictor = replace(
            self._predictor([item.feed for item in bound], results),
            gives_vectors=with_vectors,
            keeps_rows=len(columns) > (1 if packs else len(bound)),
            packs=packs,
        )
        # The generator stops Spark from copying the expression into a filter, which would run the network
        # twice. `inline` makes the columns at once; Spark would write and read again a struct of vectors.
        made, made_columns = F.array(prediction_expression(predictor, columns)), [_RESULT]
        if with_vectors and len(results.types) > 1:
            made_columns = [f"{_RESULT}{number}" for number in range(len(results.types))]
            result = dataset.select("*", F.inline(made).alias(*made_columns))
            parts = list(map(F.col, made_columns))
        else:
            result = dataset.select("*", F.explode(made).alias(_RESULT))
            parts = [F.col(_RESULT)] if with_vectors else make_columns(_RESULT, results.types, results.widths)
        if skips and judged:
            result = result.where(parts[-1].isNotNull())
        named = [part.alias(name) for name, part in zip(names, parts, strict=True) if name]
        return result.select("*", *named).drop(*made_columns, *packed)

    def _python_columns(
        self, bound: Sequence[BoundInput], only_judged: bool = False, packs: bool = False
    ) -> list[Column]:
        """Returns the inputs, and a validity column if rows may be invalid.

        `only_judged`: whether SQL has already removed all invalid rows except unreadable images. `packs`:
        whether one struct holds all inputs.
        """
        judged = any(item.feed.judges for item in bound)
        values = [item.values for item in bound]
        given = [make_struct(values)] if packs else [to_column(each) for each in values]
        if self.getHandleInvalid() == "error" or (only_judged and not judged):
            return given
        valid = _valid(bound)
        columns = [F.when(valid, each) for each in given]
        if not packs:
            # Invalid rows get values that pandas can hold.
            columns = [
                column if item.filler is None else F.coalesce(column, to_column(item.filler))
                for column, item in zip(columns, bound, strict=True)
            ]
        return [*columns, valid]

    def _bind(self, schema: StructType, exact: bool) -> list[BoundInput]:
        self._trained()  # refuses a model that was never fitted
        self._find_offset(FieldIndex(schema, exact))  # its error names the setting
        fields = source_columns(self._inputs, self.inputColumns(), schema, exact)
        return [bind(item, field) for item, field in zip(self._inputs, fields, strict=True)]

    def _outputs(self) -> tuple[list[str], Results]:
        """Returns the names of the columns that `transform` adds ("" omits one), and their contents."""
        values = Values(shapes=self._output_shapes)
        return self.predictionColumns(len(self._output_shapes)), values

    def _all_outputs(self) -> tuple[list[str], Results]:
        """Returns the result of `_outputs`, with the columns of `innerCols` and `contributionsCol`."""
        (names, own), columns = self._outputs(), self.getInnerCols() or {}
        results = own
        if columns:
            key = self._trained().info().checkpoint_id, tuple(columns)
            if key not in self._inner:
                samples = FUNCTIONS["make_samples"](self._inputs, self.getTransformInPrediction())
                self._inner = {key: FUNCTIONS["measure_inner"](self.module(), list(columns), samples)}
            names = [*names, *columns.values()]
            results = FUNCTIONS["inner_results"](base=results, inner=self._inner[key])
        if name := self.getContributionsCol():
            names, results = [*names, name], FUNCTIONS["contributions"](results, own, self._inputs)
        return names, results

    def _predictor(self, feeds: Sequence[Any] = (), results: Results | None = None) -> Predictor:
        self._check_precision()
        model, weights = self.getModel(), self._trained()
        prepare = self.getTransformInPrediction()
        return Predictor(
            model=model.to_json() if isinstance(model, ModelSpec) else user_code.dumps(copy_to_meta(model)),
            weights_uri=weights.uri,
            weights_id=weights.info().checkpoint_id,
            feeds=tuple(feeds),
            results=results or self._outputs()[1],
            output_widths=tuple(Values(shapes=self._output_shapes).widths),
            batch_size=self._rows_per_pass(),
            prepare=b"" if prepare is None else user_code.dumps(prepare),
            use_gpu=self.getInferenceUseGpu(),
            offload=self.getInferenceOffload(),
            precision=self.getInferencePrecision(),
            layout=layout_of_inputs(self._inputs),
        )

    def _rows_per_pass(self) -> int:
        rows = self.getInferenceBatchSize()
        if self.isSet("inferenceBatchSize"):
            return rows
        # Activations of half the bytes, so twice the rows stay in a core's cache.
        rows *= 2 if self.getInferencePrecision() == "bf16" else 1
        # Fewer rows if they are as large as images.
        widths = [item.column.kind.row_bytes for item in self._inputs if item.column is not None]
        return max(1, min(rows, CHUNK_BYTES // max(1, sum(widths))))

    def _network_to_train(self) -> Any:
        """Returns the network of a fit that starts from this model of a table."""
        return self.getModel()

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
        label_columns: Sequence[str] = (),
        ignored_label: int | None = None,
    ) -> M:
        """Fills the model with a training's results. Without shard `columns`, inputs accept any numbers."""
        self._weights = HeldWeights(weights_uri)
        # Held now, because a save over one of the folder's parents may remove it.
        self._weights.hold()
        self._inputs = model_inputs(columns, input_columns or self.inputColumns())
        self._output_shapes = tuple(tuple(shape) for shape in output_shapes)
        self._summary = summary
        self._ignored_label = ignored_label
        if len(label_columns) == 1:
            kinds = [column.kind for column in columns if column.name == label_columns[0]]
            self._labels = next((kind.words or () for kind in kinds if isinstance(kind, Vocabulary)), ())
            self._label_fields = next((kind.fields for kind in kinds if isinstance(kind, Struct)), ())
        return self

    def _compare_on_shards(self, spark: SparkSession, training: CheckedTraining) -> None:
        """Adds to the summary how predictions in `inferencePrecision` differ from fp32."""
        is_private = training.config.hides_rows  # they must not be evaluated
        if self._summary is None or is_private or self.getInferencePrecision() == "fp32":
            return
        names = training.config.input_columns
        try:
            found = FUNCTIONS["compare_on_shards"](spark, self._predictor(), training.manifest, names)
        except Exception as error:  # a finished training must not be lost
            warnings.warn(
                f"inferencePrecision={self.getInferencePrecision()!r} was not compared with fp32 "
                f"({type(error).__name__}: {first_line(error)}); call comparePrecision",
                UserWarning,
                stacklevel=6,
            )
        else:
            self._summary = replace(self._summary, precision_difference=found)

    def _describe_columns(self: M, uses: Sequence[ColumnUse]) -> M:
        """Adds to the summary what became of each column of the table."""
        if self._summary is not None:
            self._summary = replace(self._summary, column_uses=tuple(uses))
        return self

    def _restore(self, uri: str, description: ModelDescription) -> None:
        weights = HeldWeights(storage.join(uri, WEIGHTS_FOLDER))
        # Held now, because the folder may be damaged, and because a pipeline that is saved over the folder
        # it was loaded from removes it before it reads the weights.
        weights.hold()
        self._weights = weights
        self._inputs = shared_columns(description.inputs)
        self._output_shapes = description.output_shapes
        self._summary = description.summary
        self._ignored_label = description.ignored_label
        self._labels = description.labels
        self._label_fields = description.label_fields

    def _outputs_of(self, features: Any) -> Array:
        predictor = self._predictor()
        row = make_row(self._inputs, self.inputColumns(), features)
        return predictor.predict(cached_module(predictor), [row])


def _valid(bound: Sequence[BoundInput]) -> Column:
    return all_of([item.valid for item in bound])
