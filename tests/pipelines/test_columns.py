from __future__ import annotations

import pytest
from pyspark.sql import types as T

from ringspark.pipelines.columns import Column, columns_from_spark, quote
from ringspark.pipelines.kinds import Array, Padded, Ragged, Scalar, Vector

SCALARS = [
    (T.BooleanType(), "bool"),
    (T.ByteType(), "int8"),
    (T.ShortType(), "int16"),
    (T.IntegerType(), "int32"),
    (T.LongType(), "int64"),
    (T.FloatType(), "float32"),
    (T.DoubleType(), "float64"),
]


@pytest.mark.parametrize(("data_type", "dtype"), SCALARS)
def test_numbers_keep_their_width(data_type: T.DataType, dtype: str) -> None:
    schema = T.StructType([T.StructField("x", data_type), T.StructField("a", T.ArrayType(data_type))])
    x, a = columns_from_spark(schema)
    assert (x.kind, a.kind) == (Scalar(dtype), Array(dtype))
    assert (x.source, a.source) == (data_type.simpleString(), f"array<{data_type.simpleString()}>")


@pytest.mark.parametrize(
    ("data_type", "shown", "remedy"),
    [
        (T.StringType(), "string", "index it with StringIndexer first"),
        (T.VarcharType(3), r"varchar\(3\)", "index it with StringIndexer first"),
        (T.BinaryType(), "binary", "decode it into an array of numbers first"),
        (T.StructType([T.StructField("a", T.LongType())]), "struct<a:bigint>", "select its fields"),
        (T.MapType(T.LongType(), T.LongType()), "map<bigint,bigint>", "select its values"),
        (T.ArrayType(T.StringType()), "array<string>", "make it an array of numbers first"),
        (T.ArrayType(T.DateType()), "array<date>", "make it an array of numbers first"),
        (T.NullType(), "void", "turn it into numbers first, or drop it"),
        (T.DayTimeIntervalType(), "interval day to second", "turn it into numbers first, or drop it"),
    ],
)
def test_other_types_are_refused_by_name_with_the_remedy(
    data_type: T.DataType, shown: str, remedy: str
) -> None:
    schema = T.StructType([T.StructField("good", T.LongType()), T.StructField("bad", data_type)])
    with pytest.raises(ValueError, match=rf"column 'bad' has type {shown}, .*{remedy}"):
        columns_from_spark(schema)


def test_two_columns_of_one_name_are_refused() -> None:
    schema = T.StructType([T.StructField("x", T.LongType()), T.StructField("x", T.LongType())])
    with pytest.raises(ValueError, match="two columns are named 'x'"):
        columns_from_spark(schema)


def test_a_dense_column_has_one_array_of_its_name() -> None:
    cube = Column(name="x", kind=Array("int8", (2, 3)))
    assert cube.is_dense
    assert (cube.dtype, cube.row_shape, cube.kind.row_bytes) == ("int8", (2, 3), 6)
    assert Column(name="x", kind=Padded("int8", length=4)).is_dense
    assert Column(name="x", kind=Vector(shape=(3,))).is_dense
    assert not Column(name="x", kind=Ragged("int8")).is_dense


def test_names_are_quoted_for_spark() -> None:
    assert quote("a.b") == "`a.b`"
    assert quote("a`b") == "`a``b`"
