"""Input rows of a job: a table in Spark's catalog, files of some format, or shards."""

from __future__ import annotations

import logging
import os
import re
from contextlib import suppress
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any
from urllib.parse import unquote

from ringspark.estimators.names import first_line

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

# Names of Spark's file formats.
FORMATS = ("parquet", "delta", "csv", "json", "orc")
_LOCATIONS = ("table", *FORMATS, "shards")


@dataclass(frozen=True, kw_only=True)
class RowSource:
    """Input rows of a job; exactly one location must be set.

    Attributes:
        table: Name of a table in Spark's catalog.
        parquet, delta, csv, json, orc: Path of files in this format.
        shards: Folder that `write_shards` wrote.
        options: Options of Spark's reader, such as `header` for CSV.
        where: SQL condition that chooses the rows.
        inPlace: Whether the workers read the files of a table without copying them to shards.
        version: Version of a Delta table, or snapshot of an Iceberg table; None for the newest version.
    """

    table: str | None = None
    parquet: str | None = None
    delta: str | None = None
    csv: str | None = None
    json: str | None = None
    orc: str | None = None
    shards: str | None = None
    options: dict[str, Any] = field(default_factory=dict)
    where: str | None = None
    inPlace: bool = False  # noqa: N815  # keys of a job are spelled like the Params
    version: int | None = None

    @property
    def location(self) -> tuple[str, str]:
        """Key and value of the location that is set, such as ("parquet", "/data/rows")."""
        ((kind, uri),) = [
            (name, getattr(self, name)) for name in _LOCATIONS if getattr(self, name) is not None
        ]
        return kind, uri

    def find_problem(self, *, trains: bool = False) -> str:
        """Returns what is wrong, such as "cannot be shards, ..."; returns "" if the source can be used.

        Only training rows (`trains`) can be shards or be read in place.
        """
        given = [name for name in _LOCATIONS if getattr(self, name) is not None]
        if len(given) != 1:
            return f"needs just one of the keys {', '.join(_LOCATIONS)}, got {' and '.join(given) or 'none'}"
        kind, uri = self.location
        if kind != "table":
            from ringspark.pipelines import storage  # late, because `--help` needs no storage client

            storage.refuse_secrets(uri)
        if not trains and (kind == "shards" or self.inPlace):
            return f"cannot be {'shards' if kind == 'shards' else 'read inPlace'}, since Spark reads the rows"
        if self.inPlace and kind not in ("parquet", "delta", "table"):
            return f"can be read inPlace only from parquet, delta or table, got {kind}"
        if kind == "shards" or self.inPlace:
            unused = [name for name in ("where", "options") if getattr(self, name)]
            if unused:
                reason = (
                    "shards are read without Spark"
                    if kind == "shards"
                    else "inPlace reads all rows of a table"
                )
                return f"cannot have {unused[0]!r}, because {reason}; remove it"
        if self.version is not None and kind not in ("delta", "table"):
            return "can have a version only with delta or table"
        return ""

    def read(self, spark: SparkSession) -> DataFrame:
        from pyspark.errors import AnalysisException, ParseException

        kind, uri = self.location
        options = self.options if self.version is None else self.options | {"versionAsOf": self.version}
        _silence_query_errors()
        try:
            reader = spark.read.options(**options)
            frame = reader.table(uri) if kind == "table" else reader.format(kind).load(uri)
            return frame if self.where is None else frame.where(self.where)
        except (AnalysisException, ParseException) as error:
            raise ValueError(f"Spark cannot read {kind} {uri!r}: {first_line(error)}") from None

    def check_apart(self, spark: SparkSession, output: str) -> None:
        """Raises ValueError if writing to `output` would remove these rows."""
        from ringspark.estimators.techniques import FUNCTIONS
        from ringspark.pipelines import Listing

        kind, uri = self.location
        uris = [uri]
        found = (
            FUNCTIONS["find_table"](spark, uri, self.version) if kind == "table" and self.inPlace else None
        )
        if isinstance(found, Listing):
            uris = [found.source.uri]
        elif kind in ("table", *FORMATS) and not (kind == "delta" and self.inPlace):
            # Spark finds the files of a table or pattern, such as "/data/2024-*", and those behind links.
            with suppress(ValueError):  # `read` says it, when the rows are needed
                files = [unquote(file) for file in self.read(spark).inputFiles()]
                # A new file in an input folder would become input rows. Tables and patterns are no folders.
                uris = [*files, *(uris if kind != "table" and not re.search(r"[*?\[{]", uri) else ())] or uris
        for each in uris:
            check_apart(spark, output, each, "the rows")

    def to_json(self) -> dict[str, Any]:
        kind, uri = self.location
        found: dict[str, Any] = {kind: uri, "where": self.where, "options": dict(self.options)}
        if kind in ("parquet", "delta", "table"):
            found["inPlace"] = self.inPlace
        if kind in ("delta", "table"):
            found["version"] = self.version
        return found


def check_apart(spark: SparkSession, output: str, uri: str, what: str) -> None:
    """Raises ValueError if `output` equals, contains or lies in `uri`; `what` says what `uri` holds."""
    from ringspark.pipelines import storage
    from ringspark.pipelines.spark_paths import resolve

    def real_folder(given: str) -> str:
        folder = storage.normalize(resolve(spark, given))
        # Other stores have no links.
        return (os.path.realpath(folder) if storage.is_local(folder) else folder).rstrip("/") + "/"

    written, read = real_folder(output), real_folder(uri)
    if written.startswith(read) or read.startswith(written):
        raise ValueError(f"{output} would be written over {what} in {uri}; give another folder")


def _silence_query_errors() -> None:
    """Stops Spark from printing a refused query as JSON; the job prints one sentence."""
    with suppress(ImportError):  # Spark 3.5 prints none
        from pyspark.logger import PySparkLogger

        PySparkLogger.getLogger("SQLQueryContextLogger").setLevel(logging.CRITICAL)
