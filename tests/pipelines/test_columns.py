from __future__ import annotations

import pytest
from pyspark.sql import types as T

from ringspark.pipelines.columns import Column, columns_from_spark, quote
from ringspark.pipelines.kinds import Array, Padded, Ragged, Scalar, Struct, Vector

SCALARS = [
    (T.BooleanType(), "bool"),
    (T.ByteType(), "int8"),
    (T.ShortType(), "int16"),
    (T.IntegerType(), "int32"),
    (T.LongType(), "int64"),
    (T.FloatType(), "float32"),
    (T.DoubleType(), "float64"),
]


def _struct(*fields: tuple[str, T.DataType]) -> T.StructType:
    return T.StructType([T.StructField(name, data_type) for name, data_type in fields])


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
        (T.MapType(T.LongType(), T.LongType()), "map<bigint,bigint>", "select its values"),
        (T.ArrayType(T.StringType()), "array<string>", "make it one first"),
        (T.ArrayType(T.DateType()), "array<date>", "make it one first"),
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


@pytest.mark.parametrize(
    ("types", "dtype"),
    [
        ([T.LongType(), T.TimestampType(), T.TimestampNTZType()], "int64"),
        ([T.IntegerType(), T.DateType()], "int32"),
        ([T.BooleanType(), T.BooleanType()], "bool"),
        ([T.BooleanType(), T.ByteType(), T.ShortType(), T.FloatType()], "float32"),
        ([T.ByteType(), T.ShortType()], "float32"),
        ([T.FloatType(), T.DateType()], "float64"),
        ([T.FloatType(), T.DecimalType(9, 2)], "float64"),
        ([T.DoubleType(), T.DecimalType(9, 2)], "float64"),
        ([T.LongType(), T.IntegerType()], "float64"),
    ],
)
def test_a_struct_has_the_dtype_that_holds_all_its_fields(types: list[T.DataType], dtype: str) -> None:
    first, *others = [(f"f{i}", data_type) for i, data_type in enumerate(types)]
    struct = _struct(("in", _struct(*others)), first, ("z", types[0]))
    (column,) = columns_from_spark(_struct(("x", struct)))
    assert (column.dtype, column.row_shape) == (dtype, (len(types) + 1,))
    assert isinstance(column.kind, Struct)
    assert column.kind.fields == (*(("in", name) for name, _ in others), ("f0",), ("z",))


@pytest.mark.parametrize(
    ("struct", "sentence"),
    [
        (
            _struct(("city", T.StringType())),
            r"column 'x' has a field 'x\.city' of type string, .*select it as a separate column",
        ),
        (
            _struct(("in", _struct(("m", T.MapType(T.LongType(), T.LongType()))))),
            r"column 'x' has a field 'x\.in\.m' of type map<bigint,bigint>",
        ),
        (
            _struct(("v", T.ArrayType(T.DoubleType()))),
            r"column 'x' has a field 'x\.v' of type array<double>",
        ),
        (_struct(("d", T.DecimalType(20, 2))), r"column 'x\.d' has type decimal\(20,2\), but float64 holds"),
        (
            _struct(("a", T.LongType()), ("A", T.LongType())),
            "column 'x' has two fields named 'a'; rename one",
        ),
        (_struct(("in", _struct())), r"column 'x\.in' has a struct without fields"),
    ],
)
def test_a_struct_of_more_than_numbers_is_refused_by_its_field(struct: T.StructType, sentence: str) -> None:
    with pytest.raises(ValueError, match=sentence):
        columns_from_spark(_struct(("x", struct)))


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
