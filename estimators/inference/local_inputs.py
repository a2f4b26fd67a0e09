"""Predictions without a Spark job, for the rows of a pandas DataFrame or the features of one row."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from math import prod
from typing import Any

import numpy as np
import pandas as pd
import pyarrow as pa
import pyarrow.compute as pc
from pyspark.sql.types import NullType, StructField, StructType

from ringspark.estimators.columns.expressions import TEMPORAL
from ringspark.estimators.columns.feeds import Feed, make_inputs, unread_error
from ringspark.estimators.columns.inputs import ModelInput, source_columns
from ringspark.estimators.inference.predict import cached_module
from ringspark.estimators.inference.predictor import Predictor
from ringspark.estimators.training.feed import Array, network_dtype
from ringspark.pipelines.columns import MASK
from ringspark.pipelines.kinds import Array as ArrayKind
from ringspark.pipelines.kinds import HashBuckets, Padded, Ragged, Scalar, Sparse, Struct, TableRow
from ringspark.pipelines.kinds.base import is_list


def needs_spark(item: ModelInput) -> bool:
    """Whether only Spark computes this input's values: hashes, structs, sparse vectors, times."""
    column = item.column
    if column is None:
        return True
    return isinstance(column.kind, HashBuckets | Struct | Sparse | TableRow) or column.source in TEMPORAL


def predict_frame(
    predictor: Predictor,
    inputs: Sequence[ModelInput],
    names: Sequence[str],
    outputs: Sequence[str],
    frame: pd.DataFrame,
) -> pd.DataFrame:
    """Returns the columns that `transform` would add for the rows of a frame, with the frame's index.

    `names` are the model's input columns, `outputs` the result columns ("" omits one).
    """
    schema = StructType([StructField(str(name), NullType()) for name in frame.columns])
    fields = source_columns(inputs, names, schema, exact=False)
    feeds, columns = [], []
    for item, field in zip(inputs, fields, strict=True):
        if needs_spark(item):
            raise ValueError(
                f"only Spark can prepare column {field.name!r}, so this model cannot predict a pandas "
                "DataFrame; call transform with a Spark DataFrame"
            )
        feed, column = _make_feed(item, field.name, frame[field.name])
        column, problems = feed.read(column)
        if problems:
            raise unread_error(field.name, next(iter(problems.values())))
        feeds.append(feed)
        columns.append(column)
    predictor = replace(predictor, feeds=tuple(feeds))
    values = predictor.predict(cached_module(predictor), make_inputs(feeds, columns))
    parts = zip(outputs, predictor.results.arrays(values), strict=True)
    made: dict[str, Any] = {name: part if part.ndim == 1 else list(part) for name, part in parts if name}
    return pd.DataFrame(made, index=frame.index)


def _make_feed(item: ModelInput, name: str, series: pd.Series[Any]) -> tuple[Feed, pa.Array]:
    assert item.column is not None
    kind = item.column.kind
    if item.part == MASK:
        return Feed(name=name, shape=(), dtype="float32"), pa.array(series.isna().to_numpy(np.float32))
    dtype = str(getattr(kind, "dtype", ""))
    if kind.is_choice:
        if isinstance(kind, Padded | Ragged) and "int" in dtype:
            column = _to_integers(name, pa.array(_to_lists(series), from_pandas=True), dtype)
        else:
            column = pa.array(_to_lists(series), kind.selected, from_pandas=True)
        feed = Feed(name=name, kind=kind, part=item.part, fills_nulls=item.fills_nulls)
        return feed, column
    dtype = str(network_dtype(dtype))
    shape = getattr(kind, "shape", ()) or ()
    feed = Feed(name=name, shape=shape, dtype=dtype, fills_nulls=item.fills_nulls)
    column = pa.array(_to_lists(series), from_pandas=item.fills_nulls)
    return feed, _to_integers(name, column, dtype) if dtype == "int64" else column


def _to_integers(name: str, column: pa.Array, dtype: str) -> pa.Array:
    """Casts numbers to integers without rounding; pandas and JSON may store whole numbers as doubles."""
    leaf, wanted = column, pa.from_numpy_dtype(dtype)
    while is_list(leaf.type):
        leaf, wanted = leaf.flatten(), pa.list_(wanted)
    if pa.types.is_floating(leaf.type) and pc.any(pc.is_nan(leaf)).as_py():
        return column  # the feed refuses NaN
    try:
        return column.cast(wanted)
    except pa.ArrowInvalid as error:
        raise ValueError(
            f"column {name!r} held {dtype} numbers in the training, but a value cannot be cast: {error}; "
            "give whole numbers in the range of that type"
        ) from None


def _to_lists(series: pd.Series[Any]) -> Any:
    if series.dtype != object:
        return series.to_numpy()
    return [
        value.toArray().tolist()
        if hasattr(value, "toArray")
        else getattr(value, "tolist", lambda v=value: v)()
        for value in series
    ]


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
            f"predict takes one vector, but this model was trained on {list(names)}, which is not one column "
            "of numbers; call transform, or call the network that module() returns"
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
