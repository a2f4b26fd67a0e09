"""Spark SQL over the inputs of a model: the values as they cross to Python, and whether a row has them."""

from __future__ import annotations

from pyspark.ml.functions import vector_to_array
from pyspark.ml.linalg import VectorUDT
from pyspark.sql import Column
from pyspark.sql import functions as F
from pyspark.sql.types import ArrayType, DataType

TEMPORAL = ("date", "timestamp", "timestamp_ntz")


def input_expression(column: Column, data_type: DataType, *, wants_floats: bool = False) -> Column:
    """Numbers as Python gets them: those that `write_shards` stores, in a form that pandas holds.

    Args:
        column: Of any type that is stored as numbers.
        data_type: Its type.
        wants_floats: Whether integers and booleans become floating values, too.
    """
    if isinstance(data_type, VectorUDT):
        inside = F.unwrap_udt(column)
        # Dense vectors are taken as they lie; Spark's own function for the others looks at each number.
        dense = F.when(inside.getField("type") == 1, inside.getField("values").cast("array<float>"))
        return dense.when(column.isNotNull(), vector_to_array(column, "float32"))
    name = data_type.typeName()
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
    if name == "decimal":
        return column.cast("double").cast("float")
    leaf, depth = leaf_type(data_type)
    # Rounded here as it would be in Python: half of the bytes on the way.
    if leaf.typeName() == "double" or (wants_floats and leaf.typeName() != "float"):
        return column.cast("array<" * depth + "float" + ">" * depth)
    return column


def leaf_type(data_type: DataType) -> tuple[DataType, int]:
    """The type of the numbers, and how many arrays they are in."""
    depth = 0
    while isinstance(data_type, ArrayType):
        data_type, depth = data_type.elementType, depth + 1
    return data_type, depth


def _has_null_elements(data_type: DataType) -> bool:
    while isinstance(data_type, ArrayType):
        if data_type.containsNull:
            return True
        data_type = data_type.elementType
    return False


def _flattened(values: Column, data_type: DataType) -> Column:
    for _ in range(leaf_type(data_type)[1] - 1):
        values = F.flatten(values)
    return values


def holds_null(source: Column, data_type: DataType) -> Column:
    """Whether the row is null or holds a null."""
    if not _has_null_elements(data_type):
        return source.isNull()
    inside = F.exists(_flattened(source, data_type), lambda value: value.isNull())
    # A null among inner arrays makes all of the flattened one null.
    return source.isNull() | F.coalesce(inside, F.lit(True))


def is_valid(
    source: Column, values: Column, data_type: DataType, *, floats: bool, fills_nulls: bool
) -> Column:
    """Whether a row has neither null nor NaN, from its `values` as they cross to Python."""
    is_vector, depth = isinstance(data_type, VectorUDT), leaf_type(data_type)[1]
    if not depth and not is_vector:
        there = F.lit(True) if fills_nulls else source.isNotNull()
        return there & ~F.isnan(values) if floats else there
    if floats:
        # Of the numbers that are given, of a sparse vector; a search is null where it may have missed.
        numbers = F.unwrap_udt(source).getField("values").cast("array<float>") if is_vector else values
        flat = numbers if is_vector else _flattened(numbers, data_type)
        found = F.array_contains(flat, F.lit(float("nan")).cast("float"))
        return ~F.coalesce(found, F.lit(not fills_nulls))
    return F.lit(True) if fills_nulls else ~holds_null(source, data_type)


def fill(values: Column, data_type: DataType) -> Column:
    """Zeros for nulls; a row that is null as a whole stays one if it is an array: Python knows its shape."""
    depth = leaf_type(data_type)[1]
    if isinstance(data_type, VectorUDT):
        return values
    if not depth:
        return F.coalesce(values, zero(data_type))
    return _fill_arrays(values, data_type) if _has_null_elements(data_type) else values


def _fill_arrays(values: Column, data_type: DataType) -> Column:
    assert isinstance(data_type, ArrayType)
    element = data_type.elementType
    if isinstance(element, ArrayType):
        return F.transform(values, lambda value: _fill_arrays(value, element))
    return F.transform(values, lambda value: F.coalesce(value, zero(element)))


def zero(data_type: DataType) -> Column:
    return F.lit(False) if data_type.typeName() == "boolean" else F.lit(0)
