"""The road to Python for Spark before 4.1, which has no UDF over Arrow arrays: a pandas UDF around it.

What goes back is Arrow inside pandas columns: it needs no copy, lists keep their NaN, and NaN is no null.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Iterator, Tuple  # noqa: UP035 (pandas_udf reads these hints)

import pandas as pd
import pyarrow as pa
from pyspark.sql import Column
from pyspark.sql.pandas.functions import pandas_udf
from pyspark.sql.types import DataType, StructType

from ringspark.estimators.columns.feeds import Feed
from ringspark.pipelines.kinds import Binary, Padded, Vocabulary
from ringspark.pipelines.kinds.base import list_type


def expression(
    function: Callable[[Iterator[Any]], Iterator[pa.Array]],
    feeds: Sequence[Feed],
    spark_type: DataType,
    columns: Sequence[Column],
) -> Column:
    """Returns a function over batches of Arrow columns applied to `columns`, as a pandas UDF."""

    # The two bodies differ only in type hints, which Spark reads.
    def frames(batches: Iterator[Tuple[pd.Series, ...]]) -> Iterator[pd.DataFrame]:  # noqa: UP006
        for result in function(_arrow(feeds, batch) for batch in batches):
            yield pd.DataFrame({i: _series(part) for i, part in enumerate(result.flatten())})

    def values(batches: Iterator[Tuple[pd.Series, ...]]) -> Iterator[pd.Series]:  # noqa: UP006
        for result in function(_arrow(feeds, batch) for batch in batches):
            yield _series(result)

    # Spark's type overloads do not cover a function that is chosen at run time.
    make_udf: Any = pandas_udf
    applied: Column = make_udf(frames if isinstance(spark_type, StructType) else values, spark_type)(*columns)
    return applied


def _arrow(feeds: Sequence[Feed], batch: Any) -> tuple[pa.Array, ...]:
    """Makes Arrow arrays of pandas columns, which say nothing of their type where all values are null."""
    # If there is only one column, Spark passes a bare Series.
    series = [batch] if isinstance(batch, pd.Series) else batch
    types = [_type(feed) for feed in feeds] + [None] * (len(series) - len(feeds))
    return tuple(
        pa.array(column.to_numpy(), data_type, from_pandas=data_type is not None)
        for column, data_type in zip(series, types, strict=True)
    )


def _type(feed: Feed) -> Any:
    if isinstance(feed.kind, Padded):
        return list_type(feed.kind.dtype)
    if isinstance(feed.kind, Vocabulary):
        return pa.string()
    return pa.binary() if isinstance(feed.kind, Binary) else None


def _series(array: pa.Array) -> pd.Series[Any]:
    return pd.Series(pd.arrays.ArrowExtensionArray(array))
