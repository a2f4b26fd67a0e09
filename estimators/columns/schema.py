"""Checks of a DataFrame's schema, on the driver, before any job starts."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from pyspark.sql.types import BinaryType, DataType, StringType, StructField, StructType

from ringspark.estimators.names import nearest
from ringspark.pipelines.columns import Column, columns_from_spark
from ringspark.pipelines.kinds import Kind
from ringspark.pipelines.kinds.image import is_spark_image

_IMAGES = "in fit, set columns={{{name!r}: Image(height, width)}} of ringspark.pipelines"

# Remedies for columns that are no numbers; ids of strings go into an nn.Embedding.
_REMEDIES: dict[type[DataType], str] = {
    StringType: "in fit, set columns={{{name!r}: Vocabulary(max_size=1000)}} or HashBuckets(1024) for "
    "ids of strings, or Tokens.of(tokenizer) for ids of tokens, all of ringspark.pipelines",
    BinaryType: _IMAGES + " for encoded images, or Binary('npy', shape=...)",
}


def find_field(name: str, param: str, schema: StructType, exact: bool) -> StructField:
    """Returns the only field called `name`; raises ValueError if none or several. Errors name `param`."""
    return FieldIndex(schema, exact).find(name, param)


class FieldIndex:
    """Index of a schema's fields by name, as Spark finds them: case is ignored unless `exact`."""

    def __init__(self, schema: StructType, exact: bool) -> None:
        self.schema, self._names, self._exact = schema, schema.names, exact
        self._fields: dict[str, list[StructField]] = {}
        for field in schema.fields:
            self._fields.setdefault(field.name if exact else field.name.lower(), []).append(field)

    def all(self, name: str) -> list[StructField]:
        """Returns the fields that Spark means by a name."""
        return self._fields.get(name if self._exact else name.lower(), [])

    def find(self, name: str, param: str) -> StructField:
        """Returns the only field called `name`, like `find_field`."""
        found = self.all(name)
        if not found:
            hint = nearest(name, self._names) or f"; the DataFrame has {self._names}"
            raise ValueError(f"{param} {name!r} is not a column of the DataFrame{hint}")
        if len(found) > 1:
            raise ValueError(
                f"column {name!r} is ambiguous, the DataFrame has {[f.name for f in found]}; "
                "rename one of them"
            )
        return found[0]


def input_names(
    names: Sequence[str], kinds: Mapping[str, Kind], fields: FieldIndex
) -> tuple[list[str], tuple[str, ...]]:
    """Returns the columns from which inputs are made, and the inputs' names as the DataFrame spells them.

    A name is a column, or one array of a column whose type gives several: "words.length" is the array
    `length` of the column `words`.
    """
    sources, found = [], []
    for name in names:
        owner, _, part = name.rpartition(".")
        owners = [field.name for field in fields.all(owner) if not fields.all(name)]
        if owners and owners[0] in kinds and f"{owners[0]}.{part}" in kinds[owners[0]].batch_names(owners[0]):
            sources.append(owners[0])
            found.append(f"{owners[0]}.{part}")
        else:
            sources.append(fields.find(name, "featuresCol or inputCols").name)
            found.append(sources[-1])
    return sources, tuple(found)


def kinds_by_column(given: Mapping[str, Kind], fields: FieldIndex) -> dict[str, Kind]:
    """Returns the column types that a user chose, by column name as the DataFrame spells it."""
    kinds: dict[str, Kind] = {}
    for name, kind in given.items():
        found = fields.find(name, "columns").name
        if found in kinds:
            raise ValueError(f"the setting columns names {found!r} twice, in different case; keep only one")
        kinds[found] = kind
    return kinds


def check_types(
    schema: StructType, columns: Sequence[str], kinds: Mapping[str, Kind] | None = None
) -> tuple[Column, ...]:
    """Returns the columns with the chosen `kinds`, without facts that need the data, such as lengths."""
    kinds = kinds or {}
    by_name = {field.name: field for field in reversed(schema.fields)}
    fields = [by_name[name] for name in dict.fromkeys(columns)]
    for field in fields:
        # The module is checked by name, because pyspark-client, which has no JVM, has no pyspark.mllib.
        if type(field.dataType).__module__ == "pyspark.mllib.linalg":
            raise ValueError(
                f"column {field.name!r} has a type of the old pyspark.mllib, which only its own algorithms "
                "take; convert it by MLUtils.convertVectorColumnsToML from pyspark.mllib.util"
            )
        remedy = _IMAGES if is_spark_image(field.dataType) else _REMEDIES.get(type(field.dataType))
        if remedy is not None and field.name not in kinds:
            raise ValueError(
                f"column {field.name!r} has type {field.dataType.simpleString()}; an input must be a "
                f"number, date, array or vector; {remedy.format(name=field.name)}"
            )
    return columns_from_spark(StructType(fields), {f.name: kinds[f.name] for f in fields if f.name in kinds})
