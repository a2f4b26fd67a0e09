"""Column type "struct": the numbers of a struct as one vector per row, in the order of the struct's fields.

If all fields have the same dtype, the vector has this dtype. Otherwise it has the smallest float type that
holds all their values. Whole numbers beyond 2^53, which float64 may round, then raise an error.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np
import pyarrow as pa

from ringspark.pipelines.kinds.array import Array
from ringspark.pipelines.kinds.base import Shape, match_dtype, number_type
from ringspark.pipelines.kinds.scalar import SPARK_DTYPES, Scalar, number_of
from ringspark.pipelines.kinds.values import at_path, to_list
from ringspark.pipelines.spark_errors import MARK

if TYPE_CHECKING:
    from pyspark.sql import Column as SparkColumn
    from pyspark.sql.types import DataType
    from typing_extensions import Self

SPARK_TYPES = {
    dtype: name for name, dtype in SPARK_DTYPES.items() if not name.startswith(("date", "timestamp"))
}
"""Spark's simple type name of numbers, by NumPy dtype."""

Path = tuple[str, ...]

_FLOAT32_EXACT = {"bool", "int8", "int16", "float32"}

FLOAT64_WHOLE = 1 << 53
"""Float64 holds every whole number up to this one, but not every larger one."""

_TOO_LARGE = (
    ", but float64, the common type of the fields, keeps whole numbers distinct only up to "
    f"{FLOAT64_WHOLE}; select that field as a separate column"
)


@dataclass(frozen=True)
class Struct(Array):
    """One vector per row, with the numbers of a struct; a batch holds (rows, fields).

    Attributes:
        fields: For each number, the path of field names to it, from the outermost struct inwards. If it is
            empty, the Spark type determines the fields. Fields are found by name, in whatever order the
            struct has them.
        types: Spark's simple type name of each of these fields.
    """

    tag: ClassVar[str] = "struct"
    request: ClassVar[Any] = None
    fields: tuple[Path, ...] = ()
    types: tuple[str, ...] = ()

    def adopt(self, name: str, data_type: DataType) -> Self:
        if data_type.typeName() != "struct":
            raise ValueError(
                f"column {name!r} has type {data_type.simpleString()}, not a struct; make one with F.struct"
            )
        paths = self.fields or tuple(_paths(name, data_type))
        leaves = [_leaf(name, data_type, path) for path in paths]
        named = zip(paths, leaves, strict=True)
        dtypes = {Scalar().adopt(join_path((name, *path)), leaf).dtype for path, leaf in named}
        found = "float32" if dtypes <= _FLOAT32_EXACT else "float64"
        if len(dtypes) == 1:
            (found,) = dtypes
        return replace(
            self,
            dtype=match_dtype(name, self.dtype, found),
            shape=(len(paths),),
            fields=paths,
            types=tuple(leaf.simpleString() for leaf in leaves),
        )

    def select(self, source: SparkColumn, data_type: DataType) -> SparkColumn:
        from pyspark.sql import functions as F

        numbers, large = [], {}
        for path, type_name in zip(self.fields, self.types, strict=True):
            value = source
            for part in path:
                value = value.getField(part)
            number = number_of(value, type_name)
            if self.dtype == "float64" and SPARK_DTYPES.get(type_name) == "int64":
                large[join_path(path)] = number
            numbers.append(number.cast(SPARK_TYPES[self.dtype]))
        vector = F.array(*numbers)
        if large:
            several = [*large.values(), F.lit(0)]  # Spark needs at least two arguments
            low, high = F.least(*several), F.greatest(*several)
            value = F.when(high > FLOAT64_WHOLE, high).otherwise(low)
            error = F.raise_error(_describe_large(large, value, data_type))
            # One test per row: with one test per field, Spark compiles for seconds if there are hundreds.
            is_large = (low < -FLOAT64_WHOLE) | (high > FLOAT64_WHOLE)
            vector = F.when(is_large, error).otherwise(vector)
        return F.when(source.isNotNull(), vector)

    def read_values(self, values: Any, source: str = "", zone: str = "UTC") -> Any:
        given = values if isinstance(values, pa.Array) else to_list(values)
        columns = []
        for path, type_name in zip(self.fields, self.types, strict=True):
            dtype = SPARK_DTYPES.get(type_name, "float64")
            # Whole numbers may be larger than in the training, but stay whole.
            scalar = Scalar("int64" if dtype.startswith("int") else dtype)
            (number,) = scalar.encode(scalar.read_values(at_path(given, path), type_name, zone)).arrays
            try:
                columns.append(number.cast(number_type(self.dtype)))
            except pa.ArrowInvalid:
                large = max(number.drop_null().to_pylist(), key=abs)
                raise ValueError(f"has a field {join_path(path)!r} that holds {large}{_TOO_LARGE}") from None
        # Row i has the elements i, i + rows, i + 2 * rows and so on of the joined columns.
        rows, width = len(columns[0]), len(columns)
        order = pa.array(np.arange(rows * width).reshape(width, rows).T.reshape(-1))
        offsets = pa.array(np.arange(0, rows * width + 1, width, dtype=np.int32))
        is_arrow = isinstance(values, pa.Array)
        mask = values.is_null() if is_arrow else pa.array([value is None for value in given], pa.bool_())
        return pa.ListArray.from_arrays(offsets, pa.concat_arrays(columns).take(order), mask=mask)

    def settle(self, name: str, shapes: tuple[Shape, Shape] | None, nullable: bool) -> Self:
        # The schema gives the number of fields even if all rows are null.
        return replace(self, nullable=nullable)


def join_path(path: Iterable[str]) -> str:
    return ".".join(path)


def _paths(name: str, data_type: DataType) -> Iterator[Path]:
    fields = getattr(data_type, "fields", ())
    if not fields:
        raise ValueError(f"column {name!r} has a struct without fields; drop it with df.drop")
    # Spark cannot select a field if another field has the same name, in any case.
    names = [field.name.lower() for field in fields]
    for field in fields:
        if names.count(field.name.lower()) > 1:
            raise ValueError(
                f"column {name!r} has two fields named {field.name!r}; rename one by casting the struct"
            )
        is_struct = field.dataType.typeName() == "struct"
        inside = _paths(join_path((name, field.name)), field.dataType) if is_struct else ((),)
        yield from ((field.name, *rest) for rest in inside)


def _leaf(name: str, data_type: DataType, path: Path) -> DataType:
    here = data_type
    for depth, part in enumerate(path):
        known = {field.name: field.dataType for field in getattr(here, "fields", ())}
        if part not in known:
            raise ValueError(
                f"column {name!r} lacks the field {join_path(path[: depth + 1])!r} in {here.simpleString()}; "
                "build the struct as it was for fit"
            )
        here = known[part]
    simple = here.simpleString()
    if simple not in SPARK_DTYPES and not simple.startswith("decimal"):
        raise ValueError(
            f"column {name!r} has a field {join_path((name, *path))!r} of type {simple}, but a struct may "
            "hold only numbers, booleans, dates and timestamps; select it as a separate column first, and "
            f"drop it here with F.col({name!r}).dropFields(...)"
        )
    return here


def _describe_large(
    numbers: Mapping[str, SparkColumn], value: SparkColumn, data_type: DataType
) -> SparkColumn:
    from pyspark.sql import functions as F

    names = F.array(*(F.lit(repr(name)) for name in numbers))
    name = F.element_at(names, F.array_position(F.array(*numbers.values()), value).cast("int"))
    simple = data_type.simpleString()
    return F.concat(
        F.lit(f"{MARK}the field "),
        name,
        F.lit(f" of {simple if len(simple) <= 80 else simple[:77] + '...'} holds "),
        value.cast("string"),
        F.lit(_TOO_LARGE),
    )
