"""Spark SQL for a model's inputs: the values that are sent to Python, and whether a row is valid."""

from __future__ import annotations

import json
from collections.abc import Sequence
from functools import reduce
from operator import and_

from pyspark.ml.functions import vector_to_array
from pyspark.ml.linalg import VectorUDT
from pyspark.sql import Column
from pyspark.sql import functions as F
from pyspark.sql.types import ArrayType, BooleanType, DataType, DoubleType, FloatType, IntegralType

from ringspark.pipelines.kinds.scalar import TEMPORAL, number_of

Expression = Column | str
"""A Spark column, or SQL text: for 1,000 columns, making Spark columns takes many seconds."""


def to_column(expression: Expression) -> Column:
    return F.expr(expression) if isinstance(expression, str) else expression


def all_of(conditions: Sequence[Expression]) -> Column:
    """Returns whether all conditions are true."""
    given = dict.fromkeys(each for each in conditions if isinstance(each, str))
    others = [each for each in conditions if not isinstance(each, str)]
    return reduce(and_, [*([F.expr(" AND ".join(given))] if given else []), *others])


def make_struct(values: Sequence[Expression]) -> Column:
    """Returns a struct of the values, with the fields v0, v1 and so on."""
    texts = [f"{value} AS v{index}" for index, value in enumerate(values) if isinstance(value, str)]
    if len(texts) == len(values):
        return F.expr(f"struct({', '.join(texts)})")
    return F.struct(*(to_column(value).alias(f"v{index}") for index, value in enumerate(values)))


def scalar_texts(
    source: str, data_type: DataType, *, wants_floats: bool, floats: bool, fills_nulls: bool
) -> tuple[str, str, str] | None:
    """Returns SQL of the value, validity and filler of a plain number; None for other types.

    The same as `input_expression`, `is_valid` and `zero`, as text; `source` is the column's SQL.
    """
    name = data_type.typeName()
    if not isinstance(data_type, IntegralType | FloatType | DoubleType | BooleanType):
        return None
    is_cast = name == "double" or (wants_floats and name != "float")
    values = f"CAST({source} AS FLOAT)" if is_cast else source
    filler = "false" if name == "boolean" and not wants_floats else "0"
    if fills_nulls:
        values = f"coalesce({values}, {filler})"
    valid = "true" if fills_nulls else f"{source} IS NOT NULL"
    return values, f"{valid} AND NOT isnan({values})" if floats else valid, filler


def input_expression(column: Column, data_type: DataType, *, wants_floats: bool = False) -> Column:
    """Returns the numbers that `write_shards` would store, in a form that pandas can hold.

    `wants_floats` turns integers and booleans into floats, too.
    """
    if isinstance(data_type, VectorUDT):
        inside = F.unwrap_udt(column)
        # Spark's function, which visits each number, is needed only for sparse vectors.
        dense = F.when(inside.getField("type") == 1, inside.getField("values").cast("array<float>"))
        return dense.when(column.isNotNull(), vector_to_array(column, "float32"))
    name = data_type.typeName()
    if name in TEMPORAL:
        return number_of(column, name)
    if name == "decimal":
        return number_of(column, name).cast("float")
    leaf, depth = leaf_type(data_type)
    # Rounding here instead of in Python gives the same numbers and halves the bytes to ship.
    if leaf.typeName() == "double" or (wants_floats and leaf.typeName() != "float"):
        return column.cast("array<" * depth + "float" + ">" * depth)
    return column


def class_name(number: Column, labels: Sequence[str]) -> Column:
    """Returns the string of a class; null for null, NaN and the class of unknown strings."""
    # Spark casts NaN to the integer 0, or raises an error.
    return F.when(~F.isnan(number), F.get(_texts(labels), number.cast("int")))


def class_of(text: Column, labels: Sequence[str]) -> Column:
    """Returns the number of a class as a double; unknown strings get the number after the last class."""
    place = F.array_position(_texts(labels), text.cast("string"))
    return F.when(place == 0, F.lit(len(labels))).otherwise(place - 1).cast("double")


def _texts(labels: Sequence[str]) -> Column:
    # One literal, because thousands would take seconds to reach the JVM.
    return F.from_json(F.lit(json.dumps(list(labels))), "array<string>")


def leaf_type(data_type: DataType) -> tuple[DataType, int]:
    """Returns the type of the numbers, and how many levels of arrays contain them."""
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


def _flatten(values: Column, data_type: DataType) -> Column:
    for _ in range(leaf_type(data_type)[1] - 1):
        values = F.flatten(values)
    return values


def holds_null(source: Column, data_type: DataType) -> Column:
    if not _has_null_elements(data_type):
        return source.isNull()
    inside = F.exists(_flatten(source, data_type), lambda value: value.isNull())
    # A null among the inner arrays makes the whole flattened array null.
    return source.isNull() | F.coalesce(inside, F.lit(True))


def is_valid(
    source: Column, values: Column, data_type: DataType, *, floats: bool, fills_nulls: bool
) -> Column:
    """Whether a row has no NaN, and no null unless `fills_nulls`; `values` are sent to Python."""
    is_vector, depth = isinstance(data_type, VectorUDT), leaf_type(data_type)[1]
    if not depth and not is_vector:
        there = F.lit(True) if fills_nulls else source.isNotNull()
        return there & ~F.isnan(values) if floats else there
    if floats:
        # For a sparse vector only the stored numbers count. A search is null if a null may hide a NaN.
        numbers = F.unwrap_udt(source).getField("values").cast("array<float>") if is_vector else values
        flat = numbers if is_vector else _flatten(numbers, data_type)
        found = F.array_contains(flat, F.lit(float("nan")).cast("float"))
        return ~F.coalesce(found, F.lit(not fills_nulls))
    return F.lit(True) if fills_nulls else ~holds_null(source, data_type)


def fill(values: Column, data_type: DataType, *, are_floats: bool = False) -> Column:
    """Replaces nulls by zeros; a null array stays null, because only Python knows its shape.

    `are_floats`: whether the values have been cast to floats.
    """
    if isinstance(data_type, ArrayType):
        element = data_type.elementType
        if not _has_null_elements(data_type):
            return values
        return F.transform(values, lambda value: fill(value, element, are_floats=are_floats))
    if isinstance(data_type, VectorUDT):
        return values
    return F.coalesce(values, zero(data_type, are_floats=are_floats))


def zero(data_type: DataType, *, are_floats: bool = False) -> Column:
    """Returns the zero that `fill` puts in place of a null."""
    return F.lit(False) if data_type.typeName() == "boolean" and not are_floats else F.lit(0)
