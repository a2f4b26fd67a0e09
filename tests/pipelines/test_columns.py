import pytest
from pyspark.sql import types as T

from ringspark.pipelines.columns import columns_from_spark
from ringspark.pipelines.kinds import Struct


def _struct(*fields: tuple[str, T.DataType]) -> T.StructType:
    return T.StructType([T.StructField(name, data_type) for name, data_type in fields])


@pytest.mark.parametrize(
    ("data_type", "message"),
    [
        (T.StringType(), "'x' has type string, .*index it with StringIndexer first"),
        (T.VarcharType(3), r"'x' has type varchar\(3\), .*index it with StringIndexer first"),
        (T.BinaryType(), "'x' has type binary, .*decode it into an array of numbers first"),
        (T.MapType(T.LongType(), T.LongType()), "'x' has type map<bigint,bigint>, .*select its values"),
        (T.ArrayType(T.StringType()), "'x' has type array<string>, .*make it one first"),
        (T.ArrayType(T.DateType()), "'x' has type array<date>, .*make it one first"),
        (T.NullType(), "'x' has type void, .*turn it into numbers first, or drop it"),
        (
            T.DayTimeIntervalType(),
            "'x' has type interval day to second, .*turn it into numbers first, or drop",
        ),
        (_struct(("city", T.StringType())), r"field 'x\.city' of type string, .*as a separate column"),
        (_struct(("v", T.ArrayType(T.DoubleType()))), r"field 'x\.v' of type array<double>"),
        (_struct(("in", _struct(("n", T.NullType())))), r"field 'x\.in\.n' of type void"),
        (_struct(("d", T.DecimalType(20, 2))), r"'x\.d' has type decimal\(20,2\), but float64 holds"),
        (_struct(("a", T.LongType()), ("A", T.LongType())), "'x' has two fields named 'a'; rename one"),
        (_struct(("in", _struct())), r"'x\.in' has a struct without fields"),
    ],
)
def test_other_types_are_refused_by_name_with_the_remedy(data_type: T.DataType, message: str) -> None:
    with pytest.raises(ValueError, match=f"column .*{message}"):
        columns_from_spark(_struct(("good", T.LongType()), ("x", data_type)))


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
