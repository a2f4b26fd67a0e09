"""Prediction rows/s of a 3-layer MLP by `transform`, against the same network by hand in `mapInArrow`.

The functions by hand do what any program must do there, and no more: copy a batch's numbers, run the network
in passes of 2,048 rows, and build the result columns from NumPy's arrays. The classification by hand returns
the three columns of `transform`: raw predictions and probabilities as vectors, and the class. "Constant"
reads the array column and returns one number per row. Other engines than eager torch run in the same
function. All read the same cached frame. Results go to Spark's "noop" sink, which evaluates every column and
stores none.
"""

from __future__ import annotations

import os
import sys
import tempfile
from collections.abc import Callable, Iterable
from functools import partial
from typing import TYPE_CHECKING, Any

import harness
import numpy as np
import pyarrow as pa
import torch

from ringspark.estimators import TorchClassifier, TorchRegressor
from ringspark.jobs import cli
from ringspark.models import ModelSpec

if TYPE_CHECKING:
    from pyspark.sql import DataFrame

PASS_ROWS = 2048
CONSTANT = "mapInArrow constant"
REGRESSION, CLASSIFICATION = "regression by hand", "classification by hand"


def constant(batches: Iterable[Any]) -> Iterable[Any]:
    """Yields a zero for every input row. Runs in a Spark task."""
    for batch in batches:
        yield pa.RecordBatch.from_arrays([pa.repeat(0.0, batch.num_rows)], ["prediction"])


def load_engine(
    engine: str, spec: ModelSpec, folder: str
) -> Callable[[np.ndarray[Any, Any]], np.ndarray[Any, Any]]:
    """Returns a function from inputs to outputs, (rows,) fp32."""
    torch.set_num_threads(1)
    if engine == "ONNX Runtime":
        import onnxruntime

        options = onnxruntime.SessionOptions()
        options.intra_op_num_threads = options.inter_op_num_threads = 1
        session = onnxruntime.InferenceSession(f"{folder}/network.onnx", options)
        name = session.get_inputs()[0].name
        return lambda rows: session.run(None, {name: rows})[0][:, 0]
    if engine == "AOTInductor":
        from torch._inductor import aoti_load_package

        compiled = aoti_load_package(f"{folder}/network.pt2")
        return lambda rows: compiled(torch.from_numpy(rows))[:, 0].numpy()
    module = spec.build().eval()
    module.load_state_dict(torch.load(f"{folder}/network.pt", weights_only=True))
    return lambda rows: module(torch.from_numpy(rows))[:, 0].numpy()


def outputs_by_hand(
    engine: str, spec: ModelSpec, folder: str, batches: Iterable[Any]
) -> Iterable[np.ndarray[Any, Any]]:
    """Yields the network's outputs for each batch, (rows,) float64."""
    # Spark copies this function for each task, so the worker keeps the engine elsewhere for its next tasks.
    kept = vars(sys).setdefault("_transform_rate", {})
    if (engine, folder) not in kept:
        kept[engine, folder] = load_engine(engine, spec, folder)
    run = kept[engine, folder]
    with torch.inference_mode():
        for batch in batches:
            rows = batch.column(0).flatten().to_numpy().reshape(batch.num_rows, -1).copy()
            outputs = np.empty(batch.num_rows)
            for start in range(0, batch.num_rows, PASS_ROWS):
                outputs[start : start + PASS_ROWS] = run(rows[start : start + PASS_ROWS])
            yield outputs


def regression_by_hand(engine: str, spec: ModelSpec, folder: str, batches: Iterable[Any]) -> Iterable[Any]:
    """Yields the network's output for every row, without names and checks. Runs in a Spark task."""
    for outputs in outputs_by_hand(engine, spec, folder, batches):
        yield pa.RecordBatch.from_arrays([pa.array(outputs)], ["prediction"])


def vectors(first: np.ndarray[Any, Any], second: np.ndarray[Any, Any]) -> pa.Array:
    """Returns Spark's vectors of two numbers."""
    num_rows = len(first)
    numbers = pa.array(np.stack([first, second], axis=1).reshape(-1))
    offsets = pa.array(np.arange(0, 2 * num_rows + 1, 2, dtype=np.int32))
    fields = [
        pa.field("type", pa.int8(), nullable=False),
        pa.field("size", pa.int32()),
        pa.field("indices", pa.list_(pa.field("element", pa.int32(), nullable=False))),
        pa.field("values", pa.list_(pa.field("element", pa.float64(), nullable=False))),
    ]
    parts = [pa.array(np.ones(num_rows, np.int8)), *(pa.nulls(num_rows, field.type) for field in fields[1:3])]
    values = pa.ListArray.from_arrays(offsets, numbers).cast(fields[3].type)
    return pa.StructArray.from_arrays([*parts, values], fields=fields)


def classification_by_hand(
    engine: str, spec: ModelSpec, folder: str, batches: Iterable[Any]
) -> Iterable[Any]:
    """Yields raw predictions, probabilities and class of every row. Runs in a Spark task."""
    for margin in outputs_by_hand(engine, spec, folder, batches):
        positive = 1 / (1 + np.exp(-margin))
        columns = [vectors(-margin, margin), vectors(1 - positive, positive), pa.array((margin > 0) * 1.0)]
        yield pa.RecordBatch.from_arrays(columns, ["rawPrediction", "probability", "prediction"])


def evaluate(frame: DataFrame) -> None:
    """Computes every row and column, and discards them."""
    frame.write.format("noop").mode("overwrite").save()


def fit(estimator_class: type[Any], frame: DataFrame, folder: str) -> Any:
    """Returns a model with weights of any quality: one worker, few rows."""
    estimator = estimator_class(
        model=harness.MLP,
        collective="local",
        reader="arrow",
        storageUri=folder,
        showProgress=False,
    )
    return estimator.fit(frame)


def write_engines(model: Any, folder: str) -> list[str]:
    """Writes the network of `model` for each engine that is installed; returns the engines' names."""
    torch.save(model.module().state_dict(), f"{folder}/network.pt")
    engines = ["eager"]
    for engine, file, export_format in (
        ("ONNX Runtime", "network.onnx", "onnx"),
        ("AOTInductor", "network.pt2", "aotinductor"),
    ):
        try:
            model.export(f"{folder}/{file}", format=export_format)
            engines.append(engine)
        except ValueError as error:
            print(f"without {engine}: {error}")
    return engines


def main() -> None:
    """Caches the frame as arrays and as vectors, then measures in interleaved rounds."""
    options = harness.parse(__doc__, rows=(1_000_000, 4_000), repeats=(7, 1))
    # The workers inherit it. ONNX Runtime and compiled networks would otherwise use all cores in each task.
    os.environ["OMP_NUM_THREADS"] = "1"
    with (
        tempfile.TemporaryDirectory() as folder,
        cli.spark("ringspark bench transform", harness.MASTER) as spark,
    ):
        from pyspark.ml.functions import array_to_vector
        from pyspark.ml.linalg import VectorUDT
        from pyspark.sql import functions as F
        from pyspark.sql.types import DoubleType, StructType

        frame = harness.random_frame(spark, options.rows)
        arrays = frame.select("features").cache()
        dense = arrays.select(array_to_vector(F.col("features")).alias("features")).cache()
        few = frame.limit(1000).withColumn("label", (F.col("label") > 0).cast("float"))
        regression = fit(TorchRegressor, few, folder)
        classification = fit(TorchClassifier, few, folder)
        engines = write_engines(regression, folder)
        three = StructType()
        for name in ("rawPrediction", "probability"):
            three = three.add(name, VectorUDT())
        three = three.add("prediction", DoubleType())

        def in_precision(model: Any, precision: str) -> DataFrame:
            return model.copy().setInferencePrecision(precision).transform(arrays)  # type: ignore[no-any-return]

        groups: dict[str, dict[str, DataFrame]] = {
            REGRESSION: {
                f"{REGRESSION}" + (f", {engine}" if engine != "eager" else ""): arrays.mapInArrow(
                    partial(regression_by_hand, engine, harness.MLP, folder), "prediction double"
                )
                for engine in engines
            }
            | {
                CONSTANT: arrays.mapInArrow(constant, "prediction double"),
                "regression, vector column": regression.transform(dense),
            }
            | {f"regression, {p}": in_precision(regression, p) for p in ("fp32", "bf16", "int8")},
            CLASSIFICATION: {
                CLASSIFICATION: arrays.mapInArrow(
                    partial(classification_by_hand, "eager", harness.MLP, folder), three
                ),
                "classification, vector column": classification.transform(dense),
            }
            | {f"classification, {p}": in_precision(classification, p) for p in ("fp32", "bf16", "int8")},
        }
        cases: dict[str, Callable[[], float]] = {
            name: lambda frame=frame: options.rows / harness.seconds_of(partial(evaluate, frame))  # type: ignore[misc]
            for group in groups.values()
            for name, frame in group.items()
        }
        rates = harness.measure_in_turns(cases, options.repeats)
    lines = [
        line
        for reference, group in groups.items()
        for line in harness.rate_rows({name: rates[name] for name in group}, reference)
    ]
    harness.print_table(
        f"transform_rate: rows/s, {options.rows:,} rows x {harness.DIM} fp32, MLP 32-128-128-1, "
        f"{harness.MASTER}, {options.repeats} rounds",
        ["", "median", "min", "max", "ratio to the network by hand"],
        lines,
    )


if __name__ == "__main__":
    main()
