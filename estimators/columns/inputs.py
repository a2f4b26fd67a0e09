"""Turns the columns of any DataFrame into a network's inputs, in the same way as `fit`.

On the driver, `bind` matches a model's input (`ModelInput`) with a DataFrame's column. In the Python worker,
a `Feed` makes the array.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import pyarrow as pa
from pyspark.sql import Column
from pyspark.sql import functions as F
from pyspark.sql.pandas.types import from_arrow_type
from pyspark.sql.types import ArrayType, DataType, DecimalType, StringType, StructField, StructType

from ringspark.estimators.columns.expressions import (
    Expression,
    class_of,
    fill,
    holds_null,
    input_expression,
    is_valid,
    leaf_type,
    scalar_texts,
    zero,
)
from ringspark.estimators.columns.feeds import Feed
from ringspark.estimators.columns.schema import FieldIndex, check_types
from ringspark.estimators.training.arguments import InputLayout, list_arguments, make_layout
from ringspark.estimators.training.feed import network_dtype
from ringspark.pipelines.columns import MASK, columns_from_spark, quote
from ringspark.pipelines.columns import Column as ShardColumn
from ringspark.pipelines.kinds import (
    Array,
    HashBuckets,
    Kind,
    Padded,
    Ragged,
    Scalar,
    Sparse,
    Struct,
    TableRow,
    Vector,
    Vocabulary,
)
from ringspark.pipelines.kinds.base import BatchArray
from ringspark.pipelines.kinds.scalar import SPARK_DTYPES, TEMPORAL
from ringspark.pipelines.kinds.structs import Path, join_path


@dataclass(frozen=True, kw_only=True)
class ModelInput:
    """One argument of `forward`, and the shard column that it comes from.

    Attributes:
        column: The column of the shards that the model was trained on; None if it is not known.
        part: Suffix that follows the column's name in a batch: "" or e.g. ".length" and ".isnull".
        fills_nulls: Whether the shards hold nulls as zeros, so that such rows are valid.
        place: Index in `inputCols` of the column that gives the input; None if each column gives one input.
    """

    column: ShardColumn | None = None
    part: str = ""
    fills_nulls: bool = False
    place: int | None = None

    @property
    def array(self) -> BatchArray:
        if self.column is None or self.part == MASK:
            return BatchArray("float32")
        return self.column.kind.arrays(self.column.name)[self.column.name + self.part]

    def to_json(self) -> dict[str, Any]:
        column = self.column.to_json() if self.column is not None else None
        return vars(self) | {"column": column}


@dataclass(frozen=True, kw_only=True)
class BoundInput:
    """An input matched with a column: `valid` is true if the row has neither null nor NaN.

    `filler` is sent to Python in place of an invalid value; if it is None, a null is sent.
    """

    values: Expression
    valid: Expression
    feed: Feed
    filler: Expression | None = None


def model_inputs(columns: Sequence[ShardColumn], names: Sequence[str]) -> tuple[ModelInput, ...]:
    """Returns the inputs with these names, for a model trained on shards with these columns."""
    if not columns:
        return tuple(ModelInput() for _ in names)
    known = {column.name: column for column in columns}
    expanded = list_arguments(columns, names)
    owners = {name: c for c in reversed(columns) for name in c.kind.batch_names(c.name)}
    is_plain = all(len(arguments) == 1 for arguments in expanded)
    inputs = []
    for place, name in [(place, name) for place, names in enumerate(expanded) for name in names]:
        owner = name.removesuffix(MASK)
        if owner != name and owner in known:
            item = ModelInput(column=known[owner], part=MASK, fills_nulls=True)
        else:
            column = owners[name]
            fills_nulls = column.name + MASK in known
            item = ModelInput(column=column, part=name.removeprefix(column.name), fills_nulls=fills_nulls)
        inputs.append(item if is_plain else replace(item, place=place))
    return tuple(inputs)


def shared_columns(inputs: Sequence[ModelInput]) -> tuple[ModelInput, ...]:
    """Makes inputs of equal columns share one column object, so that `make_inputs` makes no array twice."""
    known: dict[ShardColumn, ShardColumn] = {}
    return tuple(
        item if item.column is None else replace(item, column=known.setdefault(item.column, item.column))
        for item in inputs
    )


def source_names(inputs: Sequence[ModelInput], names: Sequence[str]) -> list[str]:
    places = [number if item.place is None else item.place for number, item in enumerate(inputs)]
    uses, wanted = Counter(places), max(places, default=-1) + 1
    if wanted != len(names):
        raise ValueError(f"the model takes {wanted} columns, but inputCols names {len(names)}: {names}")
    # "tokens.length" is made from "tokens", unless the model got another column of that type. A name with
    # several inputs is the name of a column.
    return [
        names[place] if uses[place] > 1 else names[place].removesuffix(item.part)
        for item, place in zip(inputs, places, strict=True)
    ]


def source_columns(
    inputs: Sequence[ModelInput], names: Sequence[str], schema: StructType, exact: bool
) -> list[StructField]:
    """Returns the columns of a DataFrame from which to make the inputs; `exact`: see `FieldIndex`."""
    fields = FieldIndex(schema, exact)
    return [
        _table_field(name, item.column.kind, fields)
        if item.column is not None and isinstance(item.column.kind, TableRow)
        else fields.find(name, "featuresCol or inputCols")
        for name, item in zip(source_names(inputs, names), inputs, strict=True)
    ]


def _table_field(name: str, kind: TableRow, fields: FieldIndex) -> StructField:
    """Returns a field `name`: a struct of the columns on which `kind` was trained."""
    found = [
        StructField(column, fields.find(column, "the model's column").dataType) for column in kind.sources
    ]
    return StructField(name, StructType(found), nullable=False)


def layout_of_inputs(inputs: Sequence[ModelInput]) -> InputLayout:
    names = [(item.column.name if item.column else "") + item.part for item in inputs]
    return make_layout([(name, item.array) for name, item in zip(names, inputs, strict=True)])


def bind(item: ModelInput, field: StructField) -> BoundInput:
    """Matches an input with a column of a DataFrame, or raises ValueError. Starts no job."""
    name, data_type, trained = field.name, field.dataType, item.column
    if trained is not None and trained.kind.is_choice:
        if isinstance(trained.kind, TableRow):
            table = trained.kind.adopt(name, data_type)
            row = table.select(F.col(quote(name)) if table.is_selected(data_type) else None, data_type)
            feed = Feed(name=name, kind=table, part=item.part, fills_nulls=item.fills_nulls)
            return BoundInput(values=row, valid="true", feed=feed)
        return _bind_choice(item, field, F.col(quote(name)))
    given = _given(field, trained)
    if isinstance(given.kind, Struct):
        source, data_type = _select_fields(F.col(quote(name)), field, given.kind)
    shape = None
    if trained is not None:
        _check_same(trained, given, data_type)
        shape = getattr(trained.kind, "shape", ()) or ()
    wants_floats = trained is not None and not _is_whole(trained)
    floats = wants_floats or _dtype(given).startswith("float")
    feed = Feed(
        name=name,
        shape=shape,
        dtype="float32" if floats else str(network_dtype(_dtype(given))),
        fills_nulls=item.fills_nulls,
    )
    texts = scalar_texts(
        quote(name), data_type, wants_floats=wants_floats, floats=floats, fills_nulls=item.fills_nulls
    )
    if texts is not None and item.part != MASK:
        return BoundInput(values=texts[0], valid=texts[1], feed=feed, filler=texts[2])
    if not isinstance(given.kind, Struct):
        source = F.col(quote(name))
    if item.part == MASK:
        return _bind_mask(name, source, data_type)
    values = input_expression(source, data_type, wants_floats=wants_floats)
    if item.fills_nulls:
        values = fill(values, data_type, are_floats=wants_floats)
    return BoundInput(
        values=values,
        valid=is_valid(source, values, data_type, floats=floats, fills_nulls=item.fills_nulls),
        feed=feed,
        filler=zero(data_type, are_floats=wants_floats) if not _rank(given, data_type) else None,
    )


def label_expression(field: StructField, fields: Sequence[Path] = ()) -> Column:
    """Returns a label as a double, or as nested arrays of doubles.

    `fields` are the fields of a struct that the model was trained on.
    """
    if isinstance(field.dataType, StringType):
        raise ValueError(
            f"labelCol {field.name!r} holds texts, but the model was trained on numbers; cast it to a number"
        )
    if isinstance(field.dataType, DecimalType):  # `fit` on a table takes decimals of any size
        return F.col(quote(field.name)).cast("double")
    is_struct = fields and isinstance(field.dataType, StructType)
    kinds = {field.name: Struct(fields=tuple(fields))} if is_struct else {}
    (column,) = check_types(StructType([field]), [field.name], kinds)
    source, data_type = F.col(quote(field.name)), field.dataType
    if isinstance(column.kind, Struct):
        source, data_type = _select_fields(source, field, column.kind)
    numbers = input_expression(source, data_type, wants_floats=True)
    depth = _rank(column, data_type)
    return numbers.cast("array<" * depth + "double" + ">" * depth)


def class_number(field: StructField, labels: Sequence[str]) -> Column:
    Vocabulary().adopt(field.name, field.dataType)
    return class_of(F.col(quote(field.name)), labels)


def _given(field: StructField, trained: ShardColumn | None = None) -> ShardColumn:
    schema = StructType([field])
    kinds: dict[str, Kind] = {}
    if trained is not None and isinstance(trained.kind, Struct) and isinstance(field.dataType, StructType):
        kinds[field.name] = Struct(fields=trained.kind.fields)
    check_types(schema, [field.name], kinds)
    (given,) = columns_from_spark(schema, kinds)
    if trained is None or not kinds:
        return given
    assert isinstance(trained.kind, Struct)
    assert isinstance(given.kind, Struct)
    for was, now in zip(_fields(trained, trained.kind), _fields(given, given.kind), strict=True):
        _check_same(was, now, field.dataType)
    # Integers of several widths stay whole, as they were in the training.
    return replace(given, kind=replace(given.kind, dtype="int64")) if _is_whole(trained) else given


def _fields(column: ShardColumn, kind: Struct) -> list[ShardColumn]:
    return [
        ShardColumn(
            name=join_path((column.name, *path)),
            kind=Scalar(SPARK_DTYPES.get(source, "float64")),
            source=source,
        )
        for path, source in zip(kind.fields, kind.types, strict=True)
    ]


def _select_fields(source: Column, field: StructField, kind: Struct) -> tuple[Column, ArrayType]:
    return kind.select(source, field.dataType), ArrayType(from_arrow_type(pa.from_numpy_dtype(kind.dtype)))


def _bind_mask(name: str, source: Column, data_type: DataType, is_null: Column | None = None) -> BoundInput:
    """Binds a null mask: 1 for a row that is null or holds a null, otherwise 0."""
    found = holds_null(source, data_type)
    return BoundInput(
        values=found if is_null is None else found | is_null,
        valid=F.lit(True),
        feed=Feed(name=name, shape=(), dtype="float32"),
    )


def _bind_choice(item: ModelInput, field: StructField, source: Column) -> BoundInput:
    """Binds a column with a type that the user chose."""
    assert item.column is not None
    name, data_type = field.name, field.dataType
    kind = item.column.kind.adopt(name, data_type)
    values = kind.select(source, data_type)
    if item.part == MASK:
        # An image struct may have null data, and then there is no image.
        return _bind_mask(name, source, data_type, values.isNull())
    # A struct may hold a null, and then there is no value.
    valid = F.lit(True) if item.fills_nulls else source.isNotNull() & values.isNotNull()
    if isinstance(kind, HashBuckets):
        if item.fills_nulls:
            values = F.coalesce(values, F.lit(0).cast("bigint"))
        feed = Feed(name=name, shape=(), dtype="int64")
        return BoundInput(values=values, valid=valid, feed=feed, filler=F.lit(0))
    if isinstance(kind, Padded | Ragged):
        if item.fills_nulls:
            values = fill(values, data_type)
        valid = is_valid(
            source, values, data_type, floats=kind.dtype.startswith("float"), fills_nulls=item.fills_nulls
        )
    elif isinstance(kind, Sparse):
        valid = is_valid(source, source, data_type, floats=True, fills_nulls=item.fills_nulls)
    feed = Feed(name=name, kind=kind, part=item.part, fills_nulls=item.fills_nulls)
    return BoundInput(values=values, valid=valid, feed=feed)


def _check_same(trained: ShardColumn, given: ShardColumn, data_type: DataType) -> None:
    wrong = _rank(trained) != _rank(given, data_type)
    wrong |= isinstance(trained.kind, Struct) != isinstance(given.kind, Struct)
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
            f"column {given.name!r} has type {given.source}, but the model was trained on "
            f"{trained.source or trained.kind} ({trained.kind}); cast it, or give a column of this type"
        )


def _dtype(column: ShardColumn) -> str:
    # works before a write has settled the shape
    return str(getattr(column.kind, "dtype", ""))


def _is_whole(column: ShardColumn) -> bool:
    return _dtype(column).startswith(("int", "uint"))


def _rank(column: ShardColumn, data_type: DataType | None = None) -> int:
    if isinstance(column.kind, Scalar):
        return 0
    if isinstance(column.kind, Array) and column.kind.shape is not None:
        return len(column.kind.shape)
    return 1 if isinstance(column.kind, Vector) or data_type is None else leaf_type(data_type)[1]
