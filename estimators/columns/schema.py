"""Checks of a DataFrame's schema, on the driver, before any job starts."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from pyspark.sql.types import BinaryType, DataType, StringType, StructField, StructType

from ringspark.estimators.names import nearest
from ringspark.pipelines.columns import Column, columns_from_spark
from ringspark.pipelines.kinds import Kind
from ringspark.pipelines.kinds.image import is_spark_image

_IMAGES = "have fit decode it, by columns={{{name!r}: Image(height, width)}} of ringspark.pipelines"

# What `fit` can be told about a column that is no number; ids of strings go into an nn.Embedding.
_REMEDIES: dict[type[DataType], str] = {
    StringType: "give its strings ids in fit, by columns={{{name!r}: Vocabulary(max_size=1000)}} or "
    "HashBuckets(1024), or ids of their words by Tokens.of(tokenizer), of ringspark.pipelines",
    BinaryType: _IMAGES + " for encoded images, or Binary('npy', shape=...)",
}


def fields_named(name: str, schema: StructType, exact: bool) -> list[StructField]:
    """Returns the fields that Spark means by a name.

    Args:
        exact: Whether the session has `spark.sql.caseSensitive`; else names in another case are meant too.
    """
    if exact:
        return [field for field in schema.fields if field.name == name]
    return [field for field in schema.fields if field.name.lower() == name.lower()]


def field_named(name: str, param: str, schema: StructType, exact: bool) -> StructField:
    """Returns the one field that Spark means by a name.

    Args:
        param: Name of the Param that holds the name.
        exact: See `fields_named`.

    Raises:
        ValueError: There is none, and the message names the nearest one; or there are several.
    """
    found = fields_named(name, schema, exact)
    if not found:
        hint = nearest(name, schema.names) or f"; the DataFrame has {schema.names}"
        raise ValueError(f"{param} {name!r} is not a column of the DataFrame{hint}")
    if len(found) > 1:
        raise ValueError(
            f"column {name!r} is ambiguous, the DataFrame has {[f.name for f in found]}; rename one of them"
        )
    return found[0]


def input_names(
    names: Sequence[str], kinds: Mapping[str, Kind], schema: StructType, exact: bool
) -> tuple[list[str], tuple[str, ...]]:
    """Returns the columns from which inputs are made, and the inputs' names as the DataFrame spells them.

    Args:
        names: Names of columns, or of one of the arrays that a kind makes of its column ("words.length").
        kinds: Kinds that were chosen, by the columns' names as the DataFrame has them.
        exact: See `fields_named`.

    Raises:
        ValueError: A name is neither; the message has the nearest one.
    """
    sources, found = [], []
    for name in names:
        owner, _, part = name.rpartition(".")
        owners = [f.name for f in fields_named(owner, schema, exact) if not fields_named(name, schema, exact)]
        if owners and owners[0] in kinds and f"{owners[0]}.{part}" in kinds[owners[0]].batch_names(owners[0]):
            sources.append(owners[0])
            found.append(f"{owners[0]}.{part}")
        else:
            sources.append(field_named(name, "featuresCol or inputCols", schema, exact).name)
            found.append(sources[-1])
    return sources, tuple(found)


def kinds_by_column(given: Mapping[str, Kind], schema: StructType, exact: bool) -> dict[str, Kind]:
    """Returns the kinds that a user chose by the columns' names as the DataFrame has them.

    Raises:
        ValueError: A name is no column, or two names are one.
    """
    kinds: dict[str, Kind] = {}
    for name, kind in given.items():
        found = field_named(name, "columns", schema, exact).name
        if found in kinds:
            raise ValueError(f"columns names {found!r} twice, in different case; keep one of the two")
        kinds[found] = kind
    return kinds


def check_types(
    schema: StructType, columns: Sequence[str], kinds: Mapping[str, Kind] | None = None
) -> tuple[Column, ...]:
    """Refuses columns of types that a network can neither take nor be trained on.

    Args:
        kinds: Kinds that were chosen for some of the columns.

    Raises:
        ValueError: A column has such a type, or not one for its kind; the message has name and remedy.

    Returns:
        The columns, whose kinds are complete but for what the data settles.
    """
    kinds = kinds or {}
    fields = [schema[name] for name in dict.fromkeys(columns)]
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
                f"column {field.name!r} has type {field.dataType.simpleString()}, which is no number, "
                f"date, array or vector; {remedy.format(name=field.name)}"
            )
    return columns_from_spark(StructType(fields), {f.name: kinds[f.name] for f in fields if f.name in kinds})


def for_fit(error: ValueError) -> ValueError:
    """A refusal of `write_shards` as a user of `fit` needs it: with how to use the choices that it names."""
    if "to write_shards" not in str(error):
        return error
    return ValueError(f"{error}; fit takes the same by its setting columns")
