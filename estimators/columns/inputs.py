"""Turns the columns of any DataFrame into the numbers that `fit` saw.

A model keeps its inputs in the form of the shards (`ModelInput`: a column with its kind). On the driver,
`bind` matches an input with the schema of a DataFrame. It refuses a column that cannot hold the same
values. It gives two SQL expressions, one for the values that cross to Python and one for whether a row
has them, and a `Feed`, which makes the array in the Python worker. Numbers, arrays and vectors cross as
numbers and become one NumPy array without a look at single rows; strings, padded rows and bytes go
through the code of their kind.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from pyspark.sql import Column
from pyspark.sql import functions as F
from pyspark.sql.types import DataType, StructField, StructType

from ringspark.estimators.columns.expressions import (
    TEMPORAL,
    fill,
    holds_null,
    input_expression,
    is_valid,
    leaf_type,
    zero,
)
from ringspark.estimators.columns.feeds import Feed
from ringspark.estimators.columns.schema import check_types, field_named
from ringspark.estimators.training.feed import network_dtype
from ringspark.pipelines.columns import Column as ShardColumn
from ringspark.pipelines.columns import columns_from_spark, quote
from ringspark.pipelines.kinds import Array, Binary, HashBuckets, Padded, Scalar, Vector, Vocabulary

MASK = ".isnull"


@dataclass(frozen=True, kw_only=True)
class ModelInput:
    """One argument of `forward`, in the form that the shards held.

    Attributes:
        column: The column of the shards; None if the shards are not known.
        part: Suffix that follows the column's name in a batch: "" or e.g. ".length" and ".isnull".
        fills_nulls: Whether the shards kept nulls as zeros; such rows are valid then.
    """

    column: ShardColumn | None = None
    part: str = ""
    fills_nulls: bool = False

    def to_json(self) -> dict[str, Any]:
        """Returns the input as JSON values."""
        column = self.column.to_json() if self.column is not None else None
        return {"column": column, "part": self.part, "fills_nulls": self.fills_nulls}


@dataclass(frozen=True, kw_only=True)
class BoundInput:
    """An input of the model, matched with a column of one DataFrame.

    Attributes:
        values: Expression for the values that cross to Python.
        valid: Expression that is true if the row's input has neither null nor NaN.
        filler: Replacement for invalid values, if a null would turn integers into floats; else None.
        feed: Maker of the array in the Python worker.
    """

    values: Column
    valid: Column
    feed: Feed
    filler: Column | None = None


def model_inputs(columns: Sequence[ShardColumn], names: Sequence[str]) -> tuple[ModelInput, ...]:
    """Returns the inputs called `names` of a model that was trained on shards with these columns."""
    if not columns:
        return tuple(ModelInput() for _ in names)
    known = {column.name: column for column in columns}
    inputs = []
    for name in names:
        owner = name.removesuffix(MASK)
        if owner != name and owner in known:
            inputs.append(ModelInput(column=known[owner], part=MASK, fills_nulls=True))
            continue
        column = next(c for c in columns if name in c.kind.batch_names(c.name))
        inputs.append(
            ModelInput(
                column=column,
                part=name.removeprefix(column.name),
                fills_nulls=column.name + MASK in known,
            )
        )
    return tuple(inputs)


def source_columns(
    inputs: Sequence[ModelInput], names: Sequence[str], schema: StructType, exact: bool
) -> list[StructField]:
    """Returns the columns of a DataFrame from which the inputs called `names` are made.

    Args:
        exact: See `fields_named`.

    Raises:
        ValueError: There are more or fewer names than inputs, or the DataFrame lacks a column.
    """
    if len(inputs) != len(names):
        raise ValueError(f"the model has {len(inputs)} inputs, inputCols names {len(names)} columns: {names}")
    # "tokens.length" is made from "tokens", unless the model was given another column of that kind.
    owners = [name.removesuffix(item.part) for item, name in zip(inputs, names, strict=True)]
    return [field_named(owner, "featuresCol or inputCols", schema, exact) for owner in owners]


def bind(item: ModelInput, field: StructField) -> BoundInput:
    """Matches an input with a column of a DataFrame. Runs on the driver and starts no job.

    Raises:
        ValueError: The column cannot hold what the model was trained on; the message names both.
    """
    name, data_type, source = field.name, field.dataType, F.col(quote(field.name))
    trained = item.column
    if trained is not None and isinstance(trained.kind, Vocabulary | HashBuckets | Padded | Binary):
        return _bind_choice(item, field, source)
    check_types(StructType([field]), [name])
    (given,) = columns_from_spark(StructType([field]))
    shape = None
    if trained is not None:
        _check_same(name, trained, given, data_type)
        shape = getattr(trained.kind, "shape", ()) or ()
    if item.part == MASK:
        return _bind_mask(source, field)
    wants_floats = trained is not None and not _is_whole(trained)
    values = input_expression(source, data_type, wants_floats=wants_floats)
    if item.fills_nulls:
        values = fill(values, data_type)
    floats = wants_floats or _dtype(given).startswith("float")
    return BoundInput(
        values=values,
        valid=is_valid(source, values, data_type, floats=floats, fills_nulls=item.fills_nulls),
        feed=Feed(
            name=name,
            shape=shape,
            dtype="float32" if floats else str(network_dtype(_dtype(given))),
            fills_nulls=item.fills_nulls,
        ),
        filler=zero(data_type) if not _rank(given, data_type) else None,
    )


def label_expression(field: StructField) -> Column:
    """Returns the numbers of a label as doubles, or as arrays of doubles as deep as its own."""
    check_types(StructType([field]), [field.name])
    numbers = input_expression(F.col(quote(field.name)), field.dataType, wants_floats=True)
    (column,) = columns_from_spark(StructType([field]))
    depth = _rank(column, field.dataType)
    return numbers.cast("array<" * depth + "double" + ">" * depth)


def _bind_mask(source: Column, field: StructField) -> BoundInput:
    """Binds a null mask: 1 for a row that is null or holds a null, otherwise 0."""
    return BoundInput(
        values=holds_null(source, field.dataType),
        valid=F.lit(True),
        feed=Feed(name=field.name, shape=(), dtype="float32"),
    )


def _bind_choice(item: ModelInput, field: StructField, source: Column) -> BoundInput:
    """Binds a column whose kind the user chose; the kind's code runs in SQL or in Python."""
    assert item.column is not None
    kind, name, data_type = item.column.kind, field.name, field.dataType
    kind.adopt(name, data_type)
    if item.part == MASK:
        return _bind_mask(source, field)
    values = kind.select(source, data_type)
    valid = F.lit(True) if item.fills_nulls else source.isNotNull()
    if isinstance(kind, HashBuckets):
        if item.fills_nulls:
            values = F.coalesce(values, F.lit(0).cast("bigint"))
        feed = Feed(name=name, shape=(), dtype="int64")
        return BoundInput(values=values, valid=valid, feed=feed, filler=F.lit(0))
    if isinstance(kind, Padded):
        if item.fills_nulls:
            values = fill(values, data_type)
        valid = is_valid(
            source, values, data_type, floats=kind.dtype.startswith("float"), fills_nulls=item.fills_nulls
        )
    feed = Feed(name=name, kind=kind, part=item.part, fills_nulls=item.fills_nulls)
    return BoundInput(values=values, valid=valid, feed=feed)


def _check_same(name: str, trained: ShardColumn, given: ShardColumn, data_type: DataType) -> None:
    """Refuses a column whose values differ in nature from those that the model was trained on."""
    wrong = _rank(trained) != _rank(given, data_type)
    # Days and microseconds match only themselves. Whole numbers may replace fractions, but not the reverse.
    temporal = {column.source for column in (trained, given) if column.source in TEMPORAL}
    if trained.source and temporal:
        wrong |= trained.source != given.source
    elif _is_whole(trained):
        wrong |= _dtype(given) == "bool" or not _is_whole(given)
    elif _dtype(trained) == "bool":
        wrong |= _dtype(given) != "bool"
    if wrong:
        raise ValueError(
            f"column {name!r} has type {data_type.simpleString()}, the model was trained on "
            f"{trained.source or trained.kind} ({trained.kind}); cast it, or give the column of that type"
        )


def _dtype(column: ShardColumn) -> str:
    """Returns the dtype of the numbers, even if no write has settled their shape yet."""
    return str(getattr(column.kind, "dtype", ""))


def _is_whole(column: ShardColumn) -> bool:
    return _dtype(column).startswith(("int", "uint"))


def _rank(column: ShardColumn, data_type: DataType | None = None) -> int:
    """Returns the number of dimensions of a row."""
    if isinstance(column.kind, Scalar):
        return 0
    if isinstance(column.kind, Array) and column.kind.shape is not None:
        return len(column.kind.shape)
    return 1 if isinstance(column.kind, Vector) or data_type is None else leaf_type(data_type)[1]
