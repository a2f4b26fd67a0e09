"""The content of a table at one moment, and the Parquet files of a folder as a DataFrame."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from ringspark.pipelines import storage
from ringspark.pipelines.source_files import FileState
from ringspark.pipelines.spark_paths import resolve, to_spark_uri
from ringspark.pipelines.table_files import TableSource

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession
    from pyspark.sql.types import StructType

Int64Array = npt.NDArray[np.int64]

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
            raise no_files(root) from None
        # The first line may be py4j's, about one of its variables.
        lines = [line.strip(": ") for line in str(error).splitlines() if not line.startswith("An error")]
        reason = next(filter(None, lines), type(error).__name__)
        raise ValueError(f"Spark cannot read {root!r} as Parquet ({reason}); pass another folder") from error
    if is_empty:
        raise no_files(root)
    return frame


def no_files(root: str) -> ValueError:
    return ValueError(
        f"{root!r} holds no Parquet files; pass a folder with files, or with folders named 'key=value'"
    )


def escape_glob(path: str) -> str:
    return re.sub(r"([{}\[\]*?\\])", r"\\\1", path)
