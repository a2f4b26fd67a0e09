"""Predicts by a pandas UDF, because Spark before 4.1 has no UDF over Arrow arrays.

Before 4.1, Spark converts a list one Python object at a time. So results with few values per row are returned
as one double column per value.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import accumulate
from typing import Any, Iterator, Tuple  # noqa: UP035 (pandas_udf reads these hints)

import pandas as pd
import pyarrow as pa
import pyarrow.compute as pc
from pyspark.ml.functions import array_to_vector
from pyspark.ml.linalg import VectorUDT
from pyspark.sql import Column
from pyspark.sql import functions as F
from pyspark.sql.pandas.functions import pandas_udf
from pyspark.sql.types import DataType

from ringspark.estimators.columns.feeds import Feed
from ringspark.pipelines.kinds import Kind, TableRow

# Arrays with more values per row are returned as lists: Spark compiles no code for wider structs.
FLAT_WIDTH = 64


def make_expression(
    function: Callable[[Iterator[Any]], Iterator[pa.Array]],
    feeds: Sequence[Feed],
    widths: Sequence[int],
    columns: Sequence[Column],
) -> Column:
    """Returns the result of a pandas UDF that calls `function` with Arrow batches of `columns`."""

    # The two bodies differ only in type hints, which Spark reads.
    def frames(batches: Iterator[Tuple[pd.Series, ...]]) -> Iterator[pd.DataFrame]:  # noqa: UP006
        for result in function(_arrow(feeds, batch) for batch in batches):
            parts = result.flatten() if len(widths) > 1 else [result]
            yield pd.DataFrame(dict(enumerate(_series(parts, widths))))

    def values(batches: Iterator[Tuple[pd.Series, ...]]) -> Iterator[pd.Series]:  # noqa: UP006
        for result in function(_arrow(feeds, batch) for batch in batches):
            yield _doubles(result)

    # Spark's overloads do not cover a function chosen at run time.
    make_udf: Any = pandas_udf
    if list(widths) == [1]:
        single: Column = make_udf(values, "double")(*columns)
        return single
    types = ["double" if width == 1 else "array<double>" for width in widths]
    if _is_flat(widths):
        types = ["double"] * sum(widths)
    fields = ", ".join(f"v{i}: {data_type}" for i, data_type in enumerate(types))
    several: Column = make_udf(frames, f"struct<{fields}>")(*columns)
    return several


def make_columns(result: str, types: Sequence[DataType], widths: Sequence[int]) -> list[Column]:
    """Returns the user's columns of these types, made from the column `result` of `make_expression`."""
    if list(widths) == [1]:
        return [F.col(result)]
    columns, nan = [], F.lit(float("nan"))
    starts = [0, *accumulate(widths)] if _is_flat(widths) else range(len(widths))
    for data_type, width, start in zip(types, widths, starts, strict=False):
        first = F.col(f"{result}.v{start}")
        if width == 1:
            made = array_to_vector(F.array(first)) if isinstance(data_type, VectorUDT) else first
            columns.append(F.when(first.isNotNull(), made))
            continue
        # Spark reads each NaN in a list as null.
        values = F.transform(first, lambda value: F.when(value.isNull(), nan).otherwise(value))
        if _is_flat(widths):
            values = F.array(*(F.col(f"{result}.v{start + i}") for i in range(width)))
        made = array_to_vector(values) if isinstance(data_type, VectorUDT) else values
        columns.append(F.when(first.isNotNull(), made))
    return columns


def _is_flat(widths: Sequence[int]) -> bool:
    return sum(widths) <= FLAT_WIDTH


def _arrow(feeds: Sequence[Feed], batch: Any) -> tuple[pa.Array, ...]:
    # If there is only one column, Spark passes a bare Series.
    series = [batch] if isinstance(batch, pd.Series) else batch
    # The type is given, because a column of nulls does not show it.
    kinds = [feed.kind for feed in feeds] + [None] * (len(series) - len(feeds))
    return tuple(_array(column, kind) for column, kind in zip(series, kinds, strict=True))


def _array(column: Any, kind: Kind | None) -> pa.Array:
    if kind is None:
        return pa.array(column.to_numpy())
    if not isinstance(column, pd.DataFrame):
        return kind.read_values(column)
    data_type = kind.selected
    # Spark passes a struct as a frame, in which a null is a row of nulls.
    parts = [pa.array(column[field.name].to_numpy(), field.type, from_pandas=True) for field in data_type]
    # The row of a table is never null, although its first field may be.
    mask = None if isinstance(kind, TableRow) else pc.is_null(parts[0])
    return pa.StructArray.from_arrays(parts, fields=list(data_type), mask=mask)


def _series(parts: Sequence[pa.Array], widths: Sequence[int]) -> Iterator[pd.Series[Any]]:
    for part, width in zip(parts, widths, strict=True):
        if width == 1:
            yield _doubles(pc.list_element(part, 0) if pa.types.is_list(part.type) else part)
        elif _is_flat(widths):
            yield from (_doubles(pc.list_element(part, i)) for i in range(width))
        else:
            yield pd.Series(part.to_numpy(zero_copy_only=False), dtype=object)


def _doubles(values: pa.Array) -> pd.Series[Any]:
    return pd.Series(pd.arrays.ArrowExtensionArray(values))
