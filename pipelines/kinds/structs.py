"""Kind "struct": the numbers in a struct as one vector per row, in the order of the schema.

Structs inside are opened, depth first, and each field gives the number that `Scalar` stores of it. A vector
has one type: that of all fields if they share it, else the smallest float that holds all their values. Whole
numbers beyond 2^53, which float64 may round, are refused there.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, ClassVar

from ringspark.pipelines.kinds.array import Array
from ringspark.pipelines.kinds.base import Shape, matching_dtype
from ringspark.pipelines.kinds.scalar import SPARK_DTYPES, Scalar, number_of
from ringspark.pipelines.spark_errors import MARK

if TYPE_CHECKING:
    from pyspark.sql import Column as SparkColumn
    from pyspark.sql.types import DataType
    from typing_extensions import Self

SPARK_TYPES = {
    dtype: name for name, dtype in SPARK_DTYPES.items() if not name.startswith(("date", "timestamp"))
}
"""NumPy dtype -> Spark's simple type name of the numbers of that width."""

Path = tuple[str, ...]

_FLOAT32_EXACT = {"bool", "int8", "int16", "float32"}

FLOAT64_WHOLE = 1 << 53
"""Above it, float64 no longer holds every whole number."""


@dataclass(frozen=True)
class Struct(Array):
    """One vector per row, of the numbers in a struct; a batch holds (rows, fields).

    Attributes:
        fields: The names that lead to each number, from the outermost struct inwards; if empty, the Spark
            type decides. They are looked up by name, in this order, whatever the order in the struct.
        types: Spark's simple type names of these fields.
    """

    tag: ClassVar[str] = "struct"
    fields: tuple[Path, ...] = ()
    types: tuple[str, ...] = ()

    def adopt(self, name: str, data_type: DataType) -> Self:
        if data_type.typeName() != "struct":
            raise ValueError(f"column {name!r} has type {data_type.simpleString()}, which is no struct")
        paths = self.fields or tuple(_paths(name, data_type))
        leaves = [_leaf(name, data_type, path) for path in paths]
        found = common_dtype(
            [
                Scalar().adopt(dotted((name, *path)), leaf).dtype
                for path, leaf in zip(paths, leaves, strict=True)
            ]
        )
        return replace(
            self,
            dtype=matching_dtype(name, self.dtype, found),
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
                large[dotted(path)] = number
            numbers.append(number.cast(SPARK_TYPES[self.dtype]))
        vector = F.array(*numbers)
        if large:
            vector = F.when(_beyond(large.values()), F.raise_error(_refusal(large, data_type))).otherwise(
                vector
            )
        return F.when(source.isNotNull(), vector)

    def settle(self, name: str, shapes: tuple[Shape, Shape] | None, nullable: bool) -> Self:
        # The schema says how many numbers a row has, even if all rows are null.
        return replace(self, nullable=nullable)


def common_dtype(dtypes: Sequence[str]) -> str:
    """Returns the NumPy dtype for numbers of all these dtypes together."""
    if len(set(dtypes)) == 1:
        return dtypes[0]
    return "float32" if _FLOAT32_EXACT.issuperset(dtypes) else "float64"


def dotted(path: Iterable[str]) -> str:
    """Returns how Spark writes a field inside structs."""
    return ".".join(path)


def _paths(name: str, data_type: DataType) -> Iterator[Path]:
    """Yields the path of every field that is no struct itself, depth first."""
    fields = getattr(data_type, "fields", ())
    if not fields:
        raise ValueError(f"column {name!r} has a struct without fields; drop it with df.drop")
    # Spark itself finds no field whose name another one has, in whatever case.
    names = [field.name.lower() for field in fields]
    for field in fields:
        if names.count(field.name.lower()) > 1:
            raise ValueError(
                f"column {name!r} has two fields named {field.name!r}; rename one of them by a cast"
            )
        inside = _paths(dotted((name, field.name)), field.dataType) if _is_struct(field.dataType) else ((),)
        yield from ((field.name, *rest) for rest in inside)


def _leaf(name: str, data_type: DataType, path: Path) -> DataType:
    """Returns the type of the field at a path.

    Raises:
        ValueError: There is none, or it holds no number.
    """
    here = data_type
    for depth, part in enumerate(path):
        known = {field.name: field.dataType for field in getattr(here, "fields", ())}
        if part not in known:
            raise ValueError(
                f"column {name!r} lacks the field {dotted(path[: depth + 1])!r} in {here.simpleString()}; "
                "give the struct that was made in the same way"
            )
        here = known[part]
    simple = here.simpleString()
    if simple not in SPARK_DTYPES and not simple.startswith("decimal"):
        raise ValueError(
            f"column {name!r} has a field {dotted((name, *path))!r} of type {simple}, and a struct may "
            "hold numbers, booleans, dates and timestamps alone; select it as a column of its own first, and "
            f"leave it out here, F.col({name!r}).dropFields(...)"
        )
    return here


def _is_struct(data_type: DataType) -> bool:
    return data_type.typeName() == "struct"


def _extremes(numbers: Iterable[SparkColumn]) -> tuple[SparkColumn, SparkColumn]:
    """Returns the smallest and the largest of the numbers of a row that are no nulls."""
    from pyspark.sql import functions as F

    # Spark wants two of them at least.
    several = [*numbers, F.lit(0)]
    return F.least(*several), F.greatest(*several)


def _beyond(numbers: Iterable[SparkColumn]) -> SparkColumn:
    """Whether one of the numbers is beyond those that float64 tells apart."""
    low, high = _extremes(numbers)
    # One test a row: one a field takes Spark seconds to compile for hundreds of them.
    return (low < -FLOAT64_WHOLE) | (high > FLOAT64_WHOLE)


def _refusal(numbers: Mapping[str, SparkColumn], data_type: DataType) -> SparkColumn:
    """Returns the sentence for a row of which a field is `_beyond`."""
    from pyspark.sql import functions as F

    low, high = _extremes(numbers.values())
    value = F.when(high > FLOAT64_WHOLE, high).otherwise(low)
    names = F.array(*(F.lit(repr(name)) for name in numbers))
    name = F.element_at(names, F.array_position(F.array(*numbers.values()), value).cast("int"))
    simple = data_type.simpleString()
    return F.concat(
        F.lit(f"{MARK}the field "),
        name,
        F.lit(f" of {simple if len(simple) <= 80 else simple[:77] + '...'} holds "),
        value.cast("string"),
        F.lit(
            ", and float64, the type of all its fields together, tells whole numbers apart only up to "
            f"{FLOAT64_WHOLE}; select that field as a column of its own"
        ),
    )
