from __future__ import annotations

import numpy as np
import pyarrow as pa
import pytest
from pyspark.ml.linalg import VectorUDT
from pyspark.sql import types as T

from ringspark.pipelines.columns import Column, arrow_type, columns_from_spark, quote, to_numpy

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
    assert columns_from_spark(schema) == (
        Column(name="x", kind="scalar", dtype=dtype),
        Column(name="a", kind="array", dtype=dtype),
    )


def test_vectors_become_float32_arrays() -> None:
    schema = T.StructType([T.StructField("v", VectorUDT())])
    assert columns_from_spark(schema) == (Column(name="v", kind="array", dtype="float32"),)


@pytest.mark.parametrize(
    ("data_type", "shown", "remedy"),
    [
        (T.StringType(), "string", "index it with StringIndexer first"),
        (T.DateType(), "date", "turn it into numbers first"),
        (T.TimestampType(), "timestamp", "turn it into numbers first"),
        (T.TimestampNTZType(), "timestamp_ntz", "turn it into numbers first"),
        (T.DecimalType(10, 2), r"decimal\(10,2\)", "cast it to double first"),
        (T.BinaryType(), "binary", "decode it into an array of numbers first"),
        (T.StructType([T.StructField("a", T.LongType())]), "struct<a:bigint>", "select its fields"),
        (T.MapType(T.LongType(), T.LongType()), "map<bigint,bigint>", "select its values"),
        (T.ArrayType(T.StringType()), "array<string>", "make it an array of numbers first"),
        (T.ArrayType(T.ArrayType(T.FloatType())), "array<array<float>>", "make it an array of numbers first"),
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
    schema = T.StructType([T.StructField("x", T.LongType()), T.StructField("X", T.LongType())])
    with pytest.raises(ValueError, match="two columns are named 'X'"):
        columns_from_spark(schema)


def test_json_round_trip() -> None:
    for column in (
        Column(name="x", kind="scalar", dtype="int8"),
        Column(name="a", kind="array", dtype="float32", length=3),
    ):
        assert Column.from_json(column.to_json()) == column
    with pytest.raises(ValueError, match="column 'x' has an unknown kind or dtype"):
        Column(name="x", kind="scalar", dtype="float16")


def test_row_shape_and_bytes() -> None:
    array = Column(name="a", kind="array", dtype="float32", length=3)
    assert (array.row_shape, array.row_bytes) == ((3,), 12)
    scalar = Column(name="x", kind="scalar", dtype="int64")
    assert (scalar.row_shape, scalar.row_bytes) == ((), 8)


def test_names_are_quoted_for_spark() -> None:
    assert quote("a.b`c") == "`a.b``c`"


@pytest.mark.parametrize("dtype", [dtype for _, dtype in SCALARS])
def test_numpy_and_back_is_bitwise(dtype: str) -> None:
    values = (np.arange(12) % 2).astype(dtype) if dtype == "bool" else np.arange(12).astype(dtype)
    scalar = Column(name="x", kind="scalar", dtype=dtype)
    array = Column(name="x", kind="array", dtype=dtype, length=3)
    stored = pa.array(values, type=arrow_type(scalar))
    nested = pa.ListArray.from_arrays(pa.array([0, 3, 6, 9, 12], pa.int32()), stored)
    assert to_numpy(stored, scalar).tobytes() == values.tobytes()
    for data in (nested, pa.chunked_array([nested.slice(0, 1), nested.slice(1, 0), nested.slice(1)])):
        rows = to_numpy(data, array)
        assert rows.shape == (4, 3)
        assert rows.dtype == values.dtype
        assert rows.tobytes() == values.tobytes()
    assert np.array_equal(to_numpy(nested.slice(1, 2), array), values.reshape(4, 3)[1:3])


def test_one_chunk_of_numbers_is_not_copied() -> None:
    data = pa.array(np.arange(6, dtype=np.float32))
    nested = pa.ListArray.from_arrays(pa.array([0, 3, 6], pa.int32()), data)
    address = data.buffers()[1].address
    assert to_numpy(data, Column(name="x", kind="scalar", dtype="float32")).ctypes.data == address
    assert to_numpy(nested, Column(name="x", kind="array", dtype="float32", length=3)).ctypes.data == address


def test_no_rows_keep_dtype_and_shape() -> None:
    empty = to_numpy(
        pa.chunked_array([], pa.list_(pa.int16())), Column(name="a", kind="array", dtype="int16", length=4)
    )
    assert (empty.shape, empty.dtype) == ((0, 4), np.int16)


@pytest.mark.parametrize(
    ("data", "column", "message"),
    [
        (pa.array([1, None]), Column(name="x", kind="scalar", dtype="int64"), "holds nulls"),
        (pa.array([[1], [None]]), Column(name="x", kind="array", dtype="int64", length=1), "holds nulls"),
        (
            pa.array([1, 2]),
            Column(name="x", kind="scalar", dtype="int32"),
            "should hold int32, but the data is int64",
        ),
        (pa.array([1, 2]), Column(name="x", kind="array", dtype="int64", length=1), "should hold arrays"),
        (pa.array([[1], [2, 3]]), Column(name="x", kind="array", dtype="int64", length=1), "lengths vary"),
    ],
)
def test_data_that_differs_from_the_column_is_refused(data: pa.Array, column: Column, message: str) -> None:
    with pytest.raises(ValueError, match=f"column 'x' {message}|column 'x' .*{message}"):
        to_numpy(data, column)
