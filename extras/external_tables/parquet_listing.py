"""Lists a folder of Parquet files as Spark sees it: files, partition columns and their types."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any
from urllib.parse import unquote

import pyarrow as pa

from ringspark.extras.external_tables.in_place.listing import Listing, no_files, read_parquet
from ringspark.pipelines import storage
from ringspark.pipelines.source_files import path_states
from ringspark.pipelines.spark_paths import resolve
from ringspark.pipelines.table_files import TableSource

if TYPE_CHECKING:
    from pyspark.sql import SparkSession
    from pyspark.sql.types import StructField, StructType

NULL_FOLDER = "__HIVE_DEFAULT_PARTITION__"


def list_parquet(spark: SparkSession, uri: str) -> Listing:
    """Lists a folder of Parquet files, or one file; raises like `read_parquet`."""
    frame = read_parquet(spark, uri)
    root, schema = storage.normalize(resolve(spark, uri)), frame.schema
    paths = sorted({storage.normalize(unquote(name)) for name in frame.inputFiles()})
    if paths != [root]:  # Spark lists summaries such as "_metadata", which hold no rows
        paths = [path for path in paths if not _is_hidden(path.rpartition("/")[2])]
    else:
        root = root.rpartition("/")[0] or "/"
    prefix = root.rstrip("/") + "/"
    if outside := [path for path in paths if not path.startswith(prefix)]:
        raise ValueError(
            f"Spark lists {outside[0]!r}, which is outside of {root!r}; pass the folder of this file"
        )
    states = [state for state in path_states(paths) if state[1]]  # Spark skips empty files
    if not states:
        raise no_files(root)
    files = tuple((path.removeprefix(prefix), size, marks) for path, size, marks in states)
    return Listing(
        source=TableSource(uri=root),
        schema=schema,
        files=files,
        folder_columns=_folder_columns(spark, schema, [path for path, _, _ in files]),
    )


def _is_hidden(name: str) -> bool:
    """Returns whether Spark skips a file: it skips "_metadata" and ".a=b", but not "_a=b.parquet"."""
    return name.startswith(".") or (name.startswith("_") and "=" not in name)


def _unescape(name: str) -> str:
    """Decodes percent escapes as Spark does: each one is a character, not a byte of UTF-8."""
    return re.sub("%([0-9A-Fa-f]{2})", lambda found: chr(int(found[1], 16)), name)


def _folder_columns(spark: SparkSession, schema: StructType, paths: Sequence[str]) -> dict[str, Any]:
    parts = [[part.partition("=") for part in path.split("/")[:-1]] for path in paths]
    folders = [{_unescape(name): _unescape(value) for name, _, value in folder} for folder in parts]
    fields = [field for field in schema.fields if all(field.name in folder for folder in folders)]
    texts = {field.name: [folder[field.name] for folder in folders] for field in fields}
    return _cast_folder_names(spark, fields, texts) if fields else {}


def _cast_folder_names(
    spark: SparkSession, fields: Sequence[StructField], texts: Mapping[str, Sequence[str]]
) -> dict[str, Any]:
    """Converts folder names to Arrow arrays of the columns' types; Spark casts them all in one job."""
    from pyspark.sql import functions as F

    distinct = {name: sorted(set(values) - {NULL_FOLDER}) for name, values in texts.items()}
    # Spark type -> the function that gives its number, and the Arrow type of the number.
    numbers = {
        "date": (F.unix_date, pa.int32()),
        "timestamp": (F.unix_micros, pa.int64()),
        "timestamp_ntz": (F.unix_micros, pa.int64()),
    }
    columns = []
    for index, field in enumerate(fields):
        # One literal for all names, because a table may have thousands.
        names = F.from_json(F.lit(json.dumps(distinct[field.name])), "array<string>")
        simple = field.dataType.simpleString()
        cast_to = "timestamp" if simple == "timestamp_ntz" else simple
        values = names.cast(f"array<{cast_to}>")
        if simple in numbers:
            values = F.transform(values, numbers[simple][0])
        columns.append(values.alias(f"c{index}"))
    row = spark.range(1).select(*columns).first()
    assert row is not None
    found = {}
    for index, field in enumerate(fields):
        known: dict[str, Any] = dict(zip(distinct[field.name], row[index], strict=True))
        _, arrow_type = numbers.get(field.dataType.simpleString(), (None, None))
        found[field.name] = pa.array([known.get(text) for text in texts[field.name]], arrow_type)
    return found
