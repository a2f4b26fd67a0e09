"""Computes a model's results on held-out rows, for its report.

The driver predicts a random sample of limited size.

One Spark job collects the sample's inputs and labels. The same seed and DataFrame give the same sample.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from importlib.util import find_spec
from typing import Any

import numpy as np
import pyarrow as pa
from pyspark.sql import Column, DataFrame
from pyspark.sql import functions as F
from pyspark.sql.types import StructField
from torch import nn

from ringspark.estimators.columns.inputs import ModelInput
from ringspark.estimators.inference.evaluate import Evaluation
from ringspark.estimators.inference.predict import CHUNK_BYTES, cached_module, inputs_of
from ringspark.estimators.inference.predictor import Predictor
from ringspark.estimators.inference.results import Classes
from ringspark.estimators.names import check_name
from ringspark.estimators.options.checked import AtLeast1, NotNegative, check
from ringspark.estimators.training.feed import Array
from ringspark.extras.report.held_out.attributions import (
    features_of,
    integrated_gradients,
    permutation_importance,
)
from ringspark.extras.report.held_out.findings import (
    Attribution,
    HeldOut,
    class_findings,
    log_loss,
    number_findings,
)
from ringspark.extras.report.page import check_packages, report_summary
from ringspark.extras.tables.contributions import contribution_results
from ringspark.extras.tables.drift import count_batch, drifts_of
from ringspark.models.quantiles import central
from ringspark.pipelines.kinds import Struct
from ringspark.pipelines.kinds.structs import join_path
from ringspark.pipelines.kinds.table_row import TableRow
from ringspark.pipelines.local_python import choose_python

ATTRIBUTIONS = ("permutation", "captum", "none")
# Rows for attributions, which need a pass over them per feature and repetition.
ATTRIBUTED_ROWS = 2_000
EXPLAINED_ROWS = 10
_ORDER = "__ringspark_order"


@dataclass(frozen=True, kw_only=True)
class Question:
    """A model, its inputs, and how its predictions are evaluated.

    Attributes:
        fields: For each input, the field of the DataFrame that holds it.
        classes: Converts outputs of a classifier to classes; None for a regression.
        names: Names of the classes; empty if classes only have numbers.
    """

    predictor: Predictor
    inputs: Sequence[ModelInput]
    fields: Sequence[StructField]
    evaluation: Evaluation
    classes: Classes | None = None
    names: Sequence[str] = ()

    def predict(self, module: nn.Module, inputs: Sequence[Array]) -> Array:
        """Returns the outputs, (rows, outputs); if these are quantiles, only the prediction, (rows, 1)."""
        outputs, quantiles = self.predictor.predict(module, inputs), self.evaluation.quantiles
        return outputs[:, [central(quantiles)]] if quantiles else outputs


@dataclass(frozen=True)
class HeldOutReport:
    """Writes a model's report with its predictions for held-out rows; the constructor checks the options."""

    attributions: str
    rows: int
    seed: int

    def __post_init__(self) -> None:
        check_packages()
        check_name("attributions", self.attributions, ATTRIBUTIONS, otherwise="")
        check(AtLeast1, self.rows, "rows of a report")
        check(NotNegative, self.seed, "seed of a report")
        if self.attributions == "captum" and find_spec("captum") is None:
            raise ImportError(
                "attributions='captum' needs captum, which is not installed; "
                "pip install 'ringspark[attribution]', or choose attributions='permutation'"
            )

    def write(
        self,
        summary: Any,
        path: str | os.PathLike[str],
        dataset: DataFrame,
        columns: Sequence[Column],
        label: Column,
        **question: Any,
    ) -> None:
        """Predicts a sample of the rows and writes the report.

        Args:
            columns: The predictor's inputs, as for `prediction_expression`.
            question: Attributes of `Question`.

        Raises:
            ValueError: There are no rows, or the labels do not fit the predictions.
        """
        found = _findings(dataset, [*columns, label], Question(**question), self)
        report_summary(summary, path, found)


def _findings(
    dataset: DataFrame, columns: Sequence[Column], question: Question, options: HeldOutReport
) -> HeldOut:
    """Returns the results on a sample of the rows; the label is the last of the columns."""
    row_bytes = sum(item.column.kind.row_bytes for item in question.inputs if item.column is not None)
    rows, seed = max(1, min(options.rows, CHUNK_BYTES // max(1, row_bytes))), options.seed
    # One additional row shows whether there are more.
    *values, labels = _sample(dataset, columns, rows + 1, seed)
    has_more = len(labels) > rows
    values, labels = [array[:rows] for array in values], labels[:rows]
    arrays, valid = inputs_of(question.predictor, values)
    if valid is not None:
        labels = labels.filter(pa.array(valid))
    given, problem = question.evaluation.check_labels(labels)
    if problem is not None:
        raise ValueError(problem.replace("before evaluate", "before report"))
    notes = [f"Held-out rows: all {len(labels):,} rows of the given DataFrame."]
    if has_more:
        asked = f", fewer than the {options.rows:,} asked for, because they are large"
        why = asked if rows < options.rows else ""
        sample = f"{len(labels):,} rows of the given DataFrame, drawn at random with seed {seed}{why}"
        notes = [f"Held-out rows: {sample}."]
    nothing = "None of the held-out rows can be compared: each lacks a label or a finite prediction."
    if not len(labels):
        return HeldOut(notes=[*notes, nothing])
    skipped = 0 if valid is None else int((~valid).sum())
    module, classes = cached_module(question.predictor), question.classes
    outputs, true = question.predict(module, arrays), given.reshape(len(labels), -1)
    finite = np.isfinite(outputs).all(axis=1) & np.isfinite(true).all(axis=1)
    if not finite.all():
        # They would make means and bins NaN.
        infinite = int((~finite).sum())
        skipped += infinite
        notes.append(
            f"{infinite:,} of these rows are left out, because their prediction or label is not finite."
        )
    outputs, true, arrays = outputs[finite], true[finite], [array[finite] for array in arrays]
    counted = np.ones(len(true), dtype=bool) if classes is None else true[:, 0] != question.evaluation.ignored
    if not counted.any():
        return HeldOut(notes=[*notes, nothing])
    if classes is None:
        numbers = number_findings(outputs.reshape(-1), true.reshape(-1), seed=seed, skipped=skipped)
        found = HeldOut(numbers=numbers, notes=notes)
    else:
        of_classes = class_findings(
            classes.probabilities(outputs)[counted],
            classes.decide(outputs)[counted].astype(np.int64),
            true[counted, 0].astype(np.int64),
            names=question.names,
            skipped=skipped + int((~counted).sum()),
            has_thresholds=classes.thresholds is not None,
        )
        found = HeldOut(classes=of_classes, notes=notes)
    found = _compare_columns(found, question, module, values[0], arrays)
    if options.attributions == "none":
        return found
    if question.predictor.layout:
        notes.append("Rows vary in length, so feature attributions are not available.")
        return found
    explained = [array[:ATTRIBUTED_ROWS] for array in arrays]
    return replace(
        found, attribution=_attribute(question, module, explained, true[:ATTRIBUTED_ROWS], options)
    )


def _compare_columns(
    found: HeldOut, question: Question, module: nn.Module, rows: pa.Array, arrays: Sequence[Array]
) -> HeldOut:
    """Adds drift and contributions if the network's inputs are the columns of a table, `rows`."""
    own = question.predictor.results
    try:
        results = contribution_results(own, own, question.inputs)
    except ValueError:
        return found
    predictor = replace(question.predictor, results=results)
    outputs = predictor.predict(module, [array[:EXPLAINED_ROWS] for array in arrays])
    names = [*results.kind.sources, ""]
    return replace(
        found,
        drift=drifts_of(results.kind, count_batch(results.kind, rows)),
        contributions=dict(zip(names, results.arrays(outputs)[-1].T, strict=True)),
    )


def _attribute(
    question: Question, module: nn.Module, arrays: list[Array], true: Array, options: HeldOutReport
) -> Attribution:
    classes = question.classes
    names = [_entry_names(item, field) for item, field in zip(question.inputs, question.fields, strict=True)]
    features = features_of([field.name for field in question.fields], arrays, names)
    if options.attributions == "captum":
        return integrated_gradients(module, arrays, features, is_classifier=classes is not None)

    def loss(inputs: Sequence[Array]) -> float:
        values = question.predict(module, inputs)
        if classes is None:
            return float(np.sqrt(((values - true) ** 2).mean()))
        use = true[:, 0] != question.evaluation.ignored
        return log_loss(classes.probabilities(values)[use], true[use, 0].astype(np.int64))

    unit = "RMSE" if classes is None else "log loss"
    return permutation_importance(loss, arrays, features, unit=unit, seed=options.seed)


def _sample(dataset: DataFrame, columns: Sequence[Column], rows: int, seed: int) -> list[pa.Array]:
    """Returns at most `rows` random rows of the columns. Runs one Spark job."""
    choose_python(dataset.sparkSession)
    names = [f"c{number}" for number in range(len(columns))]
    given = [column.alias(name) for column, name in zip(columns, names, strict=True)]
    drawn = dataset.select(*given, F.rand(seed).alias(_ORDER)).orderBy(_ORDER).limit(rows).select(*names)
    # As Arrow bytes, which every Spark version and client passes unchanged.
    batches = [
        batch
        for row in drawn.mapInArrow(_pack, "data binary").collect()
        for batch in pa.ipc.open_stream(bytes(row["data"]))
    ]
    if not batches:
        raise ValueError("report needs held-out rows, but data has none; pass other rows, or omit data")
    table = pa.Table.from_batches(batches)
    return [pa.concat_arrays(column.chunks) for column in table.columns]


def _pack(batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
    """Yields each batch as one row of bytes. Runs in a Spark task."""
    for batch in filter(len, batches):
        sink = pa.BufferOutputStream()
        with pa.ipc.new_stream(sink, batch.schema) as writer:
            writer.write_batch(batch)
        yield pa.RecordBatch.from_pydict({"data": [sink.getvalue().to_pybytes()]})


def _entry_names(item: ModelInput, field: StructField) -> list[str]:
    """Returns names for the numbers in a row of an input; empty if there are none.

    The names are those of a struct's fields or a table's columns, or come from a VectorAssembler.
    """
    if item.column is not None and isinstance(item.column.kind, Struct):
        return [join_path((field.name, *path)) for path in item.column.kind.fields]
    if item.column is not None and isinstance(item.column.kind, TableRow):
        return item.column.kind.titles(item.part)
    groups: Any = (field.metadata or {}).get("ml_attr", {}).get("attrs", {})
    known = sorted((entry["idx"], str(entry.get("name", ""))) for group in groups.values() for entry in group)
    return [name for _, name in known] if all(name for _, name in known) else []
