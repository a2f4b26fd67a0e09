"""Makes a DataFrame of exactly the rows of a listing, as a scan of the table's files.

Without a connector, Spark knows neither the deleted rows of Delta and Iceberg tables nor their column names.
So the scan gets the listed files and their schema. Python functions filter the deleted rows, and add the
values of partition columns. In-place training reads such a scan like any other.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any
from urllib.parse import unquote

import numpy as np
import pandas as pd
import pyarrow as pa

from ringspark.extras.external_tables.in_place.file_scan import FIELD_ID, READS_FIELD_IDS
from ringspark.extras.external_tables.in_place.listing import Int64Array, Listing, escape_glob
from ringspark.pipelines import storage
from ringspark.pipelines.columns import quote
from ringspark.pipelines.local_python import choose_python
from ringspark.pipelines.spark_paths import to_spark_uri

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

# Setting of a session that finds columns by field IDs: the number of its readers, and the values before.
_READERS = "ringspark.fieldIds.readers"
_lock = threading.Lock()
# If Spark reads only some fields of a struct, it drops their IDs.
_BY_IDS = {READS_FIELD_IDS: "true", "spark.sql.optimizer.nestedSchemaPruning.enabled": "false"}


def read_listing(spark: SparkSession, listing: Listing) -> DataFrame:
    """Returns the rows of a table at the moment of its listing. Runs on the driver."""
    from pyspark.sql import functions as F
    from pyspark.sql.types import StructType

    choose_python(spark)
    root, path = listing.source.uri, F.col("_metadata.file_path")
    files = [storage.join(root, name) for name, _, _ in listing.files]
    fields = [field for field in listing.schema.fields if field.name not in listing.folder_columns]
    stored = listing.file_schema or StructType(fields)
    frame = spark.read.schema(stored).parquet(*(escape_glob(to_spark_uri(spark, file)) for file in files))
    if listing.deleted:
        deleted = {storage.join(root, name): rows for name, rows in listing.deleted.items()}
        frame = frame.where(_keeps(deleted)(path, F.col("_metadata.row_index")))
    columns: dict[str, Any] = {}
    metadata: dict[str, Any] = {}
    for field, in_file in zip(fields, stored.fields, strict=True):
        column = F.col(quote(in_file.name))
        same = field.dataType.simpleString() == in_file.dataType.simpleString()
        columns[field.name] = column if same else column.cast(field.dataType)  # renames fields of structs
        metadata[field.name] = in_file.metadata
    for name, values in listing.folder_columns.items():
        columns[name] = _value(files, values)(path).cast(listing.schema[name].dataType)
    names = listing.schema.names
    return frame.select(*(columns[name].alias(name, metadata=metadata.get(name, {})) for name in names))


@contextmanager
def reads_field_ids(spark: SparkSession, listing: Listing) -> Iterator[None]:
    """Context in which Spark finds columns by field IDs, if the listing has some."""
    if listing.file_schema is None or not any(FIELD_ID in field.metadata for field in listing.file_schema):
        yield
        return
    _count_readers(spark, 1)
    try:
        yield
    finally:
        _count_readers(spark, -1)


def _count_readers(spark: SparkSession, change: int) -> None:
    """Counts the readers of a session in its conf, because several threads may fit in one session."""
    with _lock:
        known = spark.conf.get(_READERS, None)
        count, *before = known.split() if known else ["0", *(str(spark.conf.get(name)) for name in _BY_IDS)]
        readers = int(count) + change
        for (name, value), old in zip(_BY_IDS.items(), before, strict=True):
            spark.conf.set(name, value if readers else old)
        if readers:
            spark.conf.set(_READERS, " ".join([str(readers), *before]))
        else:
            spark.conf.unset(_READERS)


def _keeps(deleted: Mapping[str, Int64Array]) -> Any:
    """Returns the Spark function (file, row number) -> whether the row is not deleted."""
    from pyspark.sql.pandas.functions import pandas_udf

    def keeps(uris: pd.Series, rows: pd.Series) -> pd.Series:
        kept = np.ones(len(rows), dtype=bool)
        for uri in uris.unique():
            gone = deleted.get(_plain(uri))
            if gone is not None:
                chosen = (uris == uri).to_numpy()
                numbers = rows.to_numpy()[chosen]
                # A number is in the sorted array if it equals the first one that is not smaller.
                at = np.minimum(np.searchsorted(gone, numbers), len(gone) - 1)
                kept[chosen] = gone[at] != numbers
        return pd.Series(kept)

    make: Any = pandas_udf
    return make(keeps, "boolean")


def _value(files: Sequence[str], values: Any) -> Any:
    """Returns the Spark function file -> text of the file's value in a partition column."""
    from pyspark.sql.pandas.functions import pandas_udf

    texts = dict(zip(files, values.cast(pa.string()).to_pylist(), strict=True))

    def value(uris: pd.Series) -> pd.Series:
        return uris.map({uri: texts[_plain(uri)] for uri in uris.unique()})

    make: Any = pandas_udf
    return make(value, "string")


def _plain(uri: str) -> str:
    return storage.normalize(unquote(uri))
