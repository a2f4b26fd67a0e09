"""The content of a table at one moment, and the files of a folder of Parquet files, as Spark sees them."""

from __future__ import annotations

import dataclasses
import json
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any
from urllib.parse import unquote

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from ringspark.pipelines import storage
from ringspark.pipelines.kinds.scalar import number_of
from ringspark.pipelines.spark_paths import resolve, to_spark_uri
from ringspark.pipelines.table_files import FileState, TableSource, path_states

if TYPE_CHECKING:
    from pyspark.sql import Column as SparkColumn
    from pyspark.sql import DataFrame, SparkSession
    from pyspark.sql.types import DataType, StructField, StructType

Int64Array = npt.NDArray[np.int64]

_NULL_FOLDER = "__HIVE_DEFAULT_PARTITION__"

_OTHER_FORMATS = {
    "_delta_log": "a Delta table, whose folder also holds files of old versions; use fitOnDelta",
    ".hoodie": "a Hudi table, whose folder also holds old versions of its rows; write it with write_shards",
}


@dataclass(frozen=True, kw_only=True)
class Listing:
    """The content of a table at one moment.

    Attributes:
        source: URI, format and version of the table.
        schema: All columns, including partition columns.
        files: (path relative to the table, number of bytes, state) of every non-empty file, sorted by path. A
            state, such as the modification time, changes if the file is replaced.
        folder_columns: For each partition column, an Arrow array with its value for each file.
        deleted: For each file with deleted rows, their row numbers in the file, as a sorted int64 array.
        file_schema: The columns without partition columns, with their names in the files, or with the field
            IDs by which Spark finds them there; None if the files have the names of `schema`.
    """

    source: TableSource
    schema: StructType
    files: tuple[FileState, ...]
    folder_columns: Mapping[str, Any]
    deleted: Mapping[str, Int64Array] = dataclasses.field(default_factory=dict)
    file_schema: StructType | None = None


def read_parquet(spark: SparkSession, uri: str) -> DataFrame:
    """Returns a DataFrame of a folder of Parquet files, or of one file. Spark reads their schema.

    Raises:
        ValueError: There is no such folder, it holds no Parquet files, or it is a table of another format.
    """
    root = storage.normalize(resolve(spark, uri))
    if not storage.exists(root):
        raise ValueError(f"there is no folder {root!r}; pass a folder that holds Parquet files")
    for name in storage.list_names(root):
        if name in _OTHER_FORMATS:
            raise ValueError(f"{root!r} is {_OTHER_FORMATS[name]}")
    try:
        frame = spark.read.parquet(escape_glob(to_spark_uri(spark, root)))
        is_empty = not frame.inputFiles()
    except Exception as error:  # Spark raises many classes
        if "UNABLE_TO_INFER_SCHEMA" in str(error) or "Unable to infer schema" in str(error):
            raise _no_files(root) from None
        # The first line may be py4j's, about one of its variables.
        lines = [line.strip(": ") for line in str(error).splitlines() if not line.startswith("An error")]
        reason = next(filter(None, lines), type(error).__name__)
        raise ValueError(f"Spark cannot read {root!r} as Parquet ({reason}); pass another folder") from error
    if is_empty:
        raise _no_files(root)
    return frame


def _no_files(root: str) -> ValueError:
    return ValueError(
        f"{root!r} holds no Parquet files; pass a folder with files, or with folders named 'key=value'"
    )


def escape_glob(path: str) -> str:
    return re.sub(r"([{}\[\]*?\\])", r"\\\1", path)


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
        raise _no_files(root)
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
    """Converts folder names to Arrow arrays of the columns' numbers; Spark casts them all in one job."""
    from pyspark.sql import functions as F

    distinct = {name: sorted(set(values) - {_NULL_FOLDER}) for name, values in texts.items()}
    columns: list[Any] = []
    for field in fields:
        # One literal for all names, because a table may have thousands.
        names = F.from_json(F.lit(json.dumps(distinct[field.name])), "array<string>")
        columns.append(F.transform(names, _to_number(field.dataType)).alias(f"c{len(columns)}"))
    row = spark.range(1).select(*columns).first()
    assert row is not None
    found = {}
    for field, values in zip(fields, row, strict=True):
        known: dict[str, Any] = dict(zip(distinct[field.name], values, strict=True))
        found[field.name] = pa.array([known.get(text) for text in texts[field.name]])
    return found


def _to_number(data_type: DataType) -> Callable[[SparkColumn], SparkColumn]:
    return lambda name: number_of(name.cast(data_type), data_type.simpleString())
