"""Batched inference as a Spark SQL expression.

Only the model's input columns go to Python; every other column stays in the JVM, untouched. The
expression is lazy, has a declared type and no state, so it serves batch and streaming alike.
Weights are read once per Python worker and kept for the tasks that the worker runs later.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Iterator, Literal, Tuple  # noqa: UP035 (pandas_udf reads these hints)

import numpy as np
import pandas as pd
import torch
from pyspark.ml.functions import array_to_vector, vector_to_array
from pyspark.ml.linalg import VectorUDT
from pyspark.sql import Column
from pyspark.sql import functions as F
from pyspark.sql.pandas.functions import pandas_udf
from pyspark.sql.types import DataType
from torch import nn

from ringspark.estimators.training.checkpoint import load_checkpoint
from ringspark.estimators.training.feed import Array
from ringspark.models import ModelSpec

Kind = Literal["classification", "regression"]

# Up to so many classes, raw predictions and probabilities leave Python as plain double columns and
# become vectors in the JVM: turning Python lists into Arrow arrays would cost most of the time.
FLAT_CLASSES = 64


@dataclass(frozen=True, kw_only=True)
class Predictor:
    """What a Python worker needs to predict; small, the weights stay on the store.

    Attributes:
        model: `ModelSpec` as JSON, or the user's module itself.
        weights_uri: Folder of the checkpoint.
        weights_id: The checkpoint's identity: another id means other weights in the same folder.
        output_width: Values per row, None where the module gives one number without a dimension.
        batch_size: Rows per forward pass.
    """

    model: str | nn.Module
    weights_uri: str
    weights_id: str
    kind: Kind
    output_width: int | None
    batch_size: int
    input_columns: tuple[str, ...]

    def load(self) -> nn.Module:
        """The trained module in eval mode, on the CPU."""
        module = ModelSpec.from_json(self.model).build() if isinstance(self.model, str) else self.model
        load_checkpoint(self.weights_uri, module)
        return module.eval()

    def predict(self, module: nn.Module, columns: Sequence[Array]) -> Array:
        """Raw outputs, (rows, width) float64."""
        num_rows = len(columns[0])
        width = self.output_width or 1
        outputs = np.empty((num_rows, width), dtype=np.float64)
        with torch.inference_mode():
            for start in range(0, num_rows, self.batch_size):
                inputs = [torch.from_numpy(c[start : start + self.batch_size]) for c in columns]
                output = module(*inputs).float()
                outputs[start : start + self.batch_size] = output.reshape(len(inputs[0]), width).numpy()
        return outputs


# Modules that this Python worker has loaded, by (folder, checkpoint id), the oldest first.
_modules: dict[tuple[str, str], nn.Module] = {}
# A worker of a CrossValidator switches between models; more than a few would hold memory for nothing.
MAX_MODULES = 2


def cached_module(predictor: Predictor) -> nn.Module:
    """The predictor's module, from this process's cache where it is there."""
    key = (predictor.weights_uri, predictor.weights_id)
    if key not in _modules:
        while len(_modules) >= MAX_MODULES:
            _modules.pop(next(iter(_modules)))
        _modules[key] = predictor.load()
    return _modules[key]


def to_input(name: str, series: pd.Series[Any]) -> Array:
    """A pandas column as the module takes it: fp32 for floating values, int64 for integers.

    Raises:
        ValueError: A null, or arrays of different lengths.
    """
    values, shape, is_null = series.to_numpy(), [len(series)], bool(series.isna().any())
    while values.dtype == object and len(values) and not is_null:
        lengths = {len(value) for value in values}
        if len(lengths) > 1:
            where = "" if len(shape) == 1 else f" in dimension {len(shape) - 1}"
            raise ValueError(
                f"column {name!r} has arrays of {min(lengths)} to {max(lengths)} elements{where} in "
                "transform; every row needs the number that the model was trained on, pad or cut them first"
            )
        shape += lengths
        # Several times faster than np.stack, which looks at every row by itself.
        values = np.concatenate(values)
        # Inside arrays pandas turns nulls into NaN, and integers beside them into floating values.
        is_null = bool(pd.isna(values).any()) if values.dtype == object else bool(np.isnan(values).any())
    if is_null:
        raise ValueError(
            f"column {name!r} has a null or NaN in transform; fill or drop them first, e.g. by df.na.drop"
        )
    values = values.reshape(shape)
    if values.dtype.kind in "fb":
        return np.ascontiguousarray(values, dtype=np.float32)
    return np.ascontiguousarray(values, dtype=np.int64)


def input_expression(column: Column, data_type: DataType) -> Column:
    """An input column as Python gets it: of the numbers that `write_shards` stores, vectors as arrays."""
    name = data_type.typeName()
    if isinstance(data_type, VectorUDT):
        return vector_to_array(column, "float32")
    if name == "date":
        return F.unix_date(column)
    if name == "timestamp":
        return F.unix_micros(column)
    if name == "timestamp_ntz":
        # Field by field: everything shorter goes through the session's time zone.
        micros = (F.date_part(F.lit("SECOND"), column) * F.lit(1_000_000)).cast("bigint")
        minutes = (
            F.unix_date(F.to_date(column)).cast("bigint") * 1_440 + F.hour(column) * 60 + F.minute(column)
        )
        return minutes * F.lit(60_000_000).cast("bigint") + micros
    return column.cast("double") if name == "decimal" else column


def softmax(logits: Array) -> Array:
    """Row-wise softmax, (rows, classes)."""
    shifted = np.exp(logits - logits.max(axis=1, keepdims=True))
    result: Array = shifted / shifted.sum(axis=1, keepdims=True)
    return result


def classify(outputs: Array) -> tuple[Array, Array, Array]:
    """(raw predictions, probabilities, classes) from logits.

    One logit z is the binary case, with raw predictions (-z, z) as Spark's LogisticRegression has.
    """
    if outputs.shape[1] == 1:
        raw = np.concatenate([-outputs, outputs], axis=1)
        # softmax of (0, z) is the sigmoid of z, without overflow on either side.
        probability = softmax(np.concatenate([np.zeros_like(outputs), outputs], axis=1))
    else:
        raw, probability = outputs, softmax(outputs)
    return raw, probability, probability.argmax(axis=1).astype(np.float64)


def prediction_type(kind: Kind, output_width: int | None) -> str:
    """Spark SQL type of what the expression gives; a classifier's struct is read by `class_columns`."""
    if kind != "classification":
        return "double" if output_width is None or output_width == 1 else "array<double>"
    num_classes = count_classes(output_width)
    if num_classes > FLAT_CLASSES:
        return "struct<raw: array<double>, probability: array<double>, prediction: double>"
    names = [f"{part}{i}" for part in ("raw", "probability") for i in range(num_classes)]
    return f"struct<{', '.join(f'{name}: double' for name in [*names, 'prediction'])}>"


def count_classes(output_width: int | None) -> int:
    """Classes of a network with `output_width` logits; one logit tells two apart."""
    return max(2, output_width or 1)


def class_columns(result: str, output_width: int | None) -> tuple[Column, Column, Column]:
    """(raw predictions, probabilities, prediction) from a classifier's result column, two as vectors."""
    num_classes = count_classes(output_width)
    if num_classes > FLAT_CLASSES:
        parts = [F.col(f"{result}.{part}") for part in ("raw", "probability")]
    else:
        parts = [
            F.array(*(F.col(f"{result}.{part}{i}") for i in range(num_classes)))
            for part in ("raw", "probability")
        ]
    return array_to_vector(parts[0]), array_to_vector(parts[1]), F.col(f"{result}.prediction")


def prediction_expression(predictor: Predictor, columns: Sequence[Column]) -> Column:
    """The model applied to `columns`; its type is `prediction_type`."""
    function = _batch_function(predictor)
    # Spark's overloads do not know a function chosen at run time.
    make_udf: Any = pandas_udf
    udf = make_udf(function, prediction_type(predictor.kind, predictor.output_width))
    expression: Column = udf(*columns)
    return expression


def _batch_function(predictor: Predictor) -> Callable[..., Any]:
    """The body of the pandas UDF; the two differ in what Spark reads from their type hints."""
    if predictor.kind == "classification":

        def classes(batches: Iterator[Tuple[pd.Series, ...]]) -> Iterator[pd.DataFrame]:  # noqa: UP006
            for outputs in run(predictor, batches):
                raw, probability, prediction = classify(outputs)
                if raw.shape[1] > FLAT_CLASSES:
                    yield pd.DataFrame(
                        {"raw": list(raw), "probability": list(probability), "prediction": prediction}
                    )
                else:
                    yield pd.DataFrame(np.column_stack([raw, probability, prediction]))

        return classes

    def values(batches: Iterator[Tuple[pd.Series, ...]]) -> Iterator[pd.Series]:  # noqa: UP006
        for outputs in run(predictor, batches):
            yield pd.Series(outputs[:, 0] if outputs.shape[1] == 1 else list(outputs))

    return values


def run(predictor: Predictor, batches: Iterator[Any]) -> Iterator[Array]:
    """Raw outputs of each batch of pandas columns. Runs in a Spark task."""
    from pyspark import TaskContext

    context = TaskContext.get()
    threads = torch.get_num_threads()
    # Tasks share the host: one that took all cores for itself would slow the others down.
    torch.set_num_threads(context.cpus() if context is not None else threads)
    try:
        module = cached_module(predictor)
        for batch in batches:
            # Spark passes a bare Series where there is one column.
            series = (batch,) if isinstance(batch, pd.Series) else batch
            columns = [to_input(n, s) for n, s in zip(predictor.input_columns, series, strict=True)]
            yield predictor.predict(module, columns)
    finally:
        torch.set_num_threads(threads)
