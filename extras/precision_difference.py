"""Compares predictions in a lower precision with predictions in fp32, in a Spark task."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from itertools import islice
from typing import Any, Literal

import numpy as np
import pyarrow as pa
from pyspark.sql import Column, DataFrame, SparkSession

from ringspark.estimators.inference.precision import PrecisionDifference
from ringspark.estimators.inference.predict import inputs_of, task_device
from ringspark.estimators.inference.predictor import Predictor
from ringspark.estimators.training.arguments import read_layout
from ringspark.estimators.training.feed import Array, to_network_input
from ringspark.pipelines import ShardManifest
from ringspark.pipelines.local_python import choose_python
from ringspark.pipelines.readers import open_reader

# Rows that a fit compares.
MAX_ROWS = 10_000
_SCHEMA = "num_rows long, num_values long, largest double, total double, changed long"


def compare_on_shards(
    spark: SparkSession, predictor: Predictor, manifest: ShardManifest, names: Sequence[str]
) -> PrecisionDifference:
    """Compares random held-out rows, or training rows if none were held out. Runs one Spark task.

    `names` are the arrays of a batch that the network gets.
    """
    rows_of: Literal["validation", "train"] = "validation"
    if not manifest.select("validation").num_rows:
        rows_of = "train"
    task = partial(_on_shards, predictor, manifest.uri, rows_of, tuple(names))
    choose_python(spark)
    found = spark.range(0, 1, 1, 1).mapInArrow(task, _SCHEMA)
    return _combine(found, predictor, rows_of)


def compare_on_rows(
    dataset: DataFrame, predictor: Predictor, columns: Sequence[Column]
) -> PrecisionDifference:
    """Compares all rows of a DataFrame; `columns` are the inputs of `predictor`. Runs one Spark job."""
    choose_python(dataset.sparkSession)
    named = [column.alias(f"c{number}") for number, column in enumerate(columns)]
    found = dataset.select(*named).mapInArrow(partial(_on_rows, predictor), _SCHEMA)
    return _combine(found, predictor, "given")


def _combine(found: DataFrame, predictor: Predictor, rows_of: Any) -> PrecisionDifference:
    parts = found.collect()
    rows = sum(part["num_rows"] for part in parts)
    if not rows:
        raise ValueError("comparePrecision needs rows with predictions, got none; pass other rows")
    return PrecisionDifference(
        precision=predictor.precision,
        rows_of=rows_of,
        rows=rows,
        largest=float(max(part["largest"] for part in parts)),
        mean=sum(part["total"] for part in parts) / sum(part["num_values"] for part in parts),
        changed_classes=sum(part["changed"] for part in parts) / rows
        if predictor.results.has_classes
        else None,
    )


def _on_shards(
    predictor: Predictor, uri: str, split: Any, names: Sequence[str], _: Any
) -> Iterator[pa.RecordBatch]:
    manifest = ShardManifest.load(uri)
    layout = read_layout(manifest, names)
    columns = list(dict.fromkeys(manifest.column_of(name).name for name in names))
    size = predictor.batch_size
    reader = open_reader(manifest.select(split), columns, batch_size=size, engine="arrow")

    def inputs(batch: dict[str, Array]) -> list[Array]:
        # The reader appends the end of the last row to the starts.
        is_starts = [bool(layout) and layout[number] == number for number in range(len(names))]
        return [
            to_network_input(batch[name][:-1] if starts else batch[name])
            for name, starts in zip(names, is_starts, strict=True)
        ]

    try:
        yield _compare(predictor, map(inputs, islice(reader.batches(0), max(1, MAX_ROWS // size))))
    finally:
        reader.close()


def _on_rows(predictor: Predictor, batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
    yield _compare(
        predictor, (inputs_of(predictor, list(batch.columns))[0] for batch in filter(len, batches))
    )


def _compare(predictor: Predictor, batches: Iterable[list[Array]]) -> pa.RecordBatch:
    """Returns one row of `_SCHEMA` about the inputs `batches`. Runs in a Spark task."""
    results, device = predictor.results, task_device(predictor.use_gpu)
    predictors = [replace(predictor, precision="fp32"), predictor]
    modules = [each.load(device) for each in predictors]
    num_rows, num_values, changed, largest, total = 0, 0, 0, 0.0, 0.0
    for columns in batches:
        exact, reduced = (p.predict(m, columns, device) for p, m in zip(predictors, modules, strict=True))
        differences = np.abs(results.comparable(reduced) - results.comparable(exact))
        num_rows, num_values = num_rows + len(exact), num_values + differences.size
        largest, total = max(largest, differences.max(initial=0)), total + differences.sum()
        if results.has_classes:
            changed += int((results.arrays(reduced)[-1] != results.arrays(exact)[-1]).sum())
    row = {"num_rows": num_rows, "num_values": num_values, "largest": largest, "total": total}
    return pa.RecordBatch.from_pylist([row | {"changed": changed}])
