"""Makes a network's inputs of the columns of a pandas DataFrame, without Spark.

Numbers, arrays and vectors, strings, padded rows and bytes are made as `transform` makes them. Of some kinds
the values are computed by Spark; they are refused.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pandas as pd
import pyarrow as pa
import pyarrow.compute as pc
from pyspark.sql.types import NullType, StructField, StructType

from ringspark.estimators.columns.expressions import TEMPORAL
from ringspark.estimators.columns.feeds import Feed, make_inputs, unread_error
from ringspark.estimators.columns.inputs import ModelInput, source_columns
from ringspark.estimators.inference.predict import Predictor, cached_module
from ringspark.estimators.training.feed import network_dtype
from ringspark.pipelines.columns import MASK
from ringspark.pipelines.kinds import HashBuckets, Kind, Padded, Ragged, Sparse, Struct
from ringspark.pipelines.kinds.base import is_list


def spark_alone(item: ModelInput) -> bool:
    """Whether only Spark makes this input's values: hashes, structs, sparse vectors, times, unknown kinds."""
    column = item.column
    if column is None:
        return True
    return isinstance(column.kind, HashBuckets | Struct | Sparse) or column.source in TEMPORAL


def predict_frame(
    predictor: Predictor,
    inputs: Sequence[ModelInput],
    names: Sequence[str],
    outputs: Sequence[str],
    frame: pd.DataFrame,
) -> pd.DataFrame:
    """Returns the columns that `transform` would add for the rows of a frame, with the frame's index.

    Args:
        predictor: The model's; its feeds are made here.
        inputs: The model's inputs.
        names: The model's input columns.
        outputs: Names of the columns of its results, "" for one left out.

    Raises:
        ValueError: A column is missing, needs Spark, or holds what the model cannot take.
    """
    schema = StructType([StructField(str(name), NullType()) for name in frame.columns])
    fields = source_columns(inputs, names, schema, exact=False)
    feeds, columns = [], []
    for item, field in zip(inputs, fields, strict=True):
        if spark_alone(item):
            raise ValueError(
                f"column {field.name!r} is prepared by Spark, so this model cannot predict a pandas "
                "DataFrame; call its stage's transform"
            )
        feed, column = _fed(item, field.name, frame[field.name])
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


def _fed(item: ModelInput, name: str, series: pd.Series[Any]) -> tuple[Feed, pa.Array]:
    """Returns the maker of an input and its Arrow column."""
    assert item.column is not None
    kind = item.column.kind
    if item.part == MASK:
        return Feed(name=name, shape=(), dtype="float32"), pa.array(series.isna().to_numpy(np.float32))
    dtype = str(getattr(kind, "dtype", ""))
    if kind.is_choice:
        if isinstance(kind, Padded | Ragged) and "int" in dtype:
            column = _whole(name, pa.array(_plain(series), from_pandas=True), dtype)
        else:
            column = pa.array(_plain(series), kind.selected, from_pandas=True)
        feed = Feed(name=name, kind=kind, part=item.part, fills_nulls=item.fills_nulls)
        return feed, column
    dtype = str(network_dtype(dtype))
    feed = Feed(name=name, shape=_shape(kind), dtype=dtype, fills_nulls=item.fills_nulls)
    column = pa.array(_plain(series), from_pandas=item.fills_nulls)
    return feed, _whole(name, column, dtype) if dtype == "int64" else column


def _whole(name: str, column: pa.Array, dtype: str) -> pa.Array:
    """Returns numbers as integers, exact ones: pandas and JSON bring whole numbers as doubles too.

    NaN is left to the feed, which refuses it.

    Raises:
        ValueError: A number is none of the dtype.
    """
    leaf, wanted = column, pa.from_numpy_dtype(dtype)
    while is_list(leaf.type):
        leaf, wanted = leaf.flatten(), pa.list_(wanted)
    if pa.types.is_floating(leaf.type) and pc.any(pc.is_nan(leaf)).as_py():
        return column
    try:
        return column.cast(wanted)
    except pa.ArrowInvalid as error:
        raise ValueError(
            f"column {name!r} held {dtype} numbers in the training, and this value cannot be one: {error}"
        ) from None


def _shape(kind: Kind) -> tuple[int, ...]:
    return getattr(kind, "shape", ()) or ()


def _plain(series: pd.Series[Any]) -> Any:
    """Returns values that Arrow takes: of an object column, rows as lists, be they vectors or arrays."""
    if series.dtype != object:
        return series.to_numpy()
    return [
        value.toArray().tolist()
        if hasattr(value, "toArray")
        else getattr(value, "tolist", lambda v=value: v)()
        for value in series
    ]
