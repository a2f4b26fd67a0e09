"""Where a job's rows come from: a table of Spark's catalog, files of a format, or shards."""

from __future__ import annotations

import logging
import os
import re
from contextlib import suppress
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any
from urllib.parse import unquote

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

# The formats of files that Spark reads by these names.
FORMATS = ("parquet", "delta", "csv", "json", "orc")
# The keys of which one must be given.
_PLACES = ("table", *FORMATS, "shards")


@dataclass(frozen=True, kw_only=True)
class RowSource:
    """Rows of a job.

    Attributes:
        table: Name of a table in Spark's catalog.
        shards: Folder that `write_shards` has written.
        options: Options of Spark's reader, such as `header` of CSV.
        where: Condition in SQL on the rows.
        inPlace: Whether the workers read the Parquet or Delta files as they are, without a copy.
        version: Version of the Delta table; unset: the newest.
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
    def place(self) -> tuple[str, str]:
        """The key that says what the rows are, and its value."""
        ((kind, uri),) = [(name, getattr(self, name)) for name in _PLACES if getattr(self, name) is not None]
        return kind, uri

    def problem(self, *, trains: bool = False) -> str:
        """Returns what refuses this source, a sentence without its subject; empty if it can be used.

        Args:
            trains: Whether these rows are trained on, which may be shards or files as they are.
        """
        given = [name for name in _PLACES if getattr(self, name) is not None]
        if len(given) != 1:
            return f"must have one of the keys {', '.join(_PLACES)}, got {' and '.join(given) or 'none'}"
        ((kind, uri),) = [(name, getattr(self, name)) for name in given]
        if kind != "table":
            from ringspark.pipelines import storage  # late, because `--help` does without a store's client

            storage.refuse_secrets(uri)
        if not trains and (kind == "shards" or self.inPlace):
            return f"must be rows that Spark reads, not {'shards' if kind == 'shards' else 'inPlace'}"
        if self.inPlace and kind not in ("parquet", "delta"):
            return f"can be read inPlace only from parquet or delta, got {kind}"
        if kind == "shards" or self.inPlace:
            unused = [name for name in ("where", "options") if getattr(self, name)]
            if unused:
                told = "shards are" if kind == "shards" else "a table inPlace is"
                return f"cannot have {unused[0]!r}, because {told} read whole; leave it out"
        if self.version is not None and kind != "delta":
            return "can have a version only with delta"
        return ""

    def frame(self, spark: SparkSession) -> DataFrame:
        """Returns the rows as a DataFrame; reads no row yet.

        Raises:
            ValueError: Spark finds no such table or files, or cannot understand the condition.
        """
        from pyspark.errors import AnalysisException, ParseException

        kind, uri = self.place
        options = {name: str(value).lower() if isinstance(value, bool) else value
                   for name, value in self.options.items()}  # fmt: skip
        if self.version is not None:
            options["versionAsOf"] = self.version
        quiet_refusals()
        try:
            reader = spark.read.options(**options)
            frame = reader.table(uri) if kind == "table" else reader.format(kind).load(uri)
            return frame if self.where is None else frame.where(self.where)
        except (AnalysisException, ParseException) as error:
            raise ValueError(f"Spark cannot read {kind} {uri!r}: {first_line(error)}") from None

    def check_apart(self, spark: SparkSession, output: str) -> None:
        """Refuses a folder to be written, and first removed, that is, holds or lies in that of the rows.

        Raises:
            ValueError: See above.
        """
        kind, uri = self.place
        places = [uri]
        if kind == "table" or (kind in FORMATS and re.search(r"[*?\[{]", uri)):
            # Spark finds the files of a table, or of a pattern such as "/data/2024-*".
            places = [unquote(file) for file in self.frame(spark).inputFiles()]
        for place in places:
            check_apart(spark, output, place, "the rows")

    def to_json(self) -> dict[str, Any]:
        """Returns the source as a job file has it, with its defaults."""
        kind, uri = self.place
        found: dict[str, Any] = {kind: uri, "where": self.where, "options": dict(self.options)}
        if kind in ("parquet", "delta"):
            found["inPlace"] = self.inPlace
        if kind == "delta":
            found["version"] = self.version
        return found


def check_apart(spark: SparkSession, output: str, uri: str, what: str) -> None:
    """Refuses a folder to be written that is, holds or lies in one that is read.

    Args:
        what: What lies in `uri`.

    Raises:
        ValueError: See above.
    """
    from ringspark.pipelines import storage
    from ringspark.pipelines.spark_paths import resolve

    written, read = (
        _without_links(storage.normalize(resolve(spark, given))).rstrip("/") + "/" for given in (output, uri)
    )
    if written.startswith(read) or read.startswith(written):
        raise ValueError(f"{output} would be written over {what} in {uri}; give another folder")


def _without_links(uri: str) -> str:
    """Resolves the links of a local path; returns URIs of other stores, which have no links, unchanged."""
    from ringspark.pipelines import storage

    return os.path.realpath(uri) if storage.is_local(uri) else uri


def first_line(error: BaseException) -> str:
    """Returns the first line of an error of Spark's, whose others show its plan."""
    return next((line.strip() for line in str(error).splitlines() if line.strip()), type(error).__name__)


def quiet_refusals() -> None:
    """Lets Spark not print a refused query as JSON with a trace; the job says it in one sentence."""
    with suppress(ImportError):  # Spark 3.5 prints none
        from pyspark.logger import PySparkLogger

        PySparkLogger.getLogger("SQLQueryContextLogger").setLevel(logging.CRITICAL)
