"""Predictions without a Spark job, for the rows of a pandas DataFrame or the features of one row."""

from __future__ import annotations

from collections.abc import Sequence
from math import prod
from typing import Any

import numpy as np
import pandas as pd

from ringspark.estimators.columns.feeds import null_error, unread_error
from ringspark.estimators.columns.inputs import ModelInput, shared_columns, source_names
from ringspark.estimators.inference.predict import cached_module
from ringspark.estimators.inference.predictor import Predictor
from ringspark.estimators.training.feed import Array, network_dtype
from ringspark.pipelines.kinds import Array as ArrayKind
from ringspark.pipelines.kinds import Scalar
from ringspark.pipelines.local_rows import MISSING, LocalInput, read_frame


def local_inputs(inputs: Sequence[ModelInput], names: Sequence[str], zone: str) -> list[LocalInput]:
    """Returns the inputs that are read without Spark.

    `names` are the model's input columns, and `zone` is the time zone of times without an offset.
    """
    inputs = shared_columns(inputs)
    sources = source_names(inputs, names)
    # The mask and the values of a column are read once.
    filled = {name for item, name in zip(inputs, sources, strict=True) if item.fills_nulls}
    return [
        LocalInput(
            name=name,
            kind=None if item.column is None else item.column.kind,
            part=item.part,
            source="" if item.column is None else item.column.source,
            fills_nulls=name in filled,
            zone=zone,
        )
        for item, name in zip(inputs, sources, strict=True)
    ]


def predict_frame(
    predictor: Predictor,
    inputs: Sequence[ModelInput],
    names: Sequence[str],
    outputs: Sequence[str],
    frame: pd.DataFrame,
    zone: str,
) -> pd.DataFrame:
    """Returns the columns that `transform` would add for the rows of a frame, with the frame's index.

    `names` are the model's input columns, `outputs` the result columns ("" omits one).
    """
    columns, problems = read_frame(local_inputs(inputs, names, zone), frame)
    for name, why in problems.values():
        raise null_error(name) if why == MISSING else unread_error(name, why)
    values = predictor.predict(cached_module(predictor), columns)
    parts = zip(outputs, predictor.results.arrays(values), strict=True)
    made: dict[str, Any] = {name: part if part.ndim == 1 else list(part) for name, part in parts if name}
    return pd.DataFrame(made, index=frame.index)


def num_features(inputs: Sequence[ModelInput]) -> int:
    """Returns the number of features of a model with one vector input; otherwise -1, as in Spark ML."""
    (first, *others) = inputs or (ModelInput(),)
    if others or first.part or first.column is None or not isinstance(first.column.kind, Scalar | ArrayKind):
        return -1
    return prod(first.column.row_shape)


def make_row(inputs: Sequence[ModelInput], names: Sequence[str], features: Any) -> Array:
    """Converts a Spark vector or numbers to the input of a forward pass, (1, ...) fp32 or int64."""
    (item, *others) = inputs
    column = item.column
    if others or item.part or not (column is None or isinstance(column.kind, Scalar | ArrayKind)):
        raise ValueError(
            "predict takes one vector, but this model was not trained on one column of numbers; call "
            "transform, or call the network that module() returns"
        )
    values = np.asarray(features.toArray() if hasattr(features, "toArray") else features)
    if values.dtype.kind not in "fbiu" or np.isnan(values).any():
        raise ValueError(f"predict takes a vector of numbers without null and NaN, got {features!r}")
    if column is None:
        return values.astype(np.float32)[None]
    shape = column.row_shape
    if values.shape != shape and (values.ndim > 1 or values.size != prod(shape)):
        raise ValueError(
            f"predict needs the {prod(shape)} numbers of one row of column {names[0]!r}, got an array of "
            f"shape {values.shape}"
        )
    given = values.reshape(1, *shape)
    row: Array = given.astype(network_dtype(column.dtype))
    if row.dtype.kind == "i" and not np.array_equal(row, given):
        raise ValueError(f"column {names[0]!r} held whole numbers in the training, got {features!r}")
    return row
