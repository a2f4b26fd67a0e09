"""Fits of an estimator on an external table: `fitOnParquet`, `fitOnDelta` and `fitOnTable`.

A run stores the version of the Delta or Iceberg table that it reads, so that a resume reads the same version.
"""

from __future__ import annotations

import json
from dataclasses import asdict, replace
from typing import Any

from pyspark.sql import SparkSession

from ringspark.estimators import run_layout
from ringspark.estimators.run.folder import RunFolder
from ringspark.estimators.stages.storage_root import active_session
from ringspark.extras.external_tables.in_place.catalog import find_table
from ringspark.extras.external_tables.in_place.delta import list_delta
from ringspark.extras.external_tables.in_place.listing import Listing, read_parquet
from ringspark.extras.external_tables.in_place.table_frame import read_listing, reads_field_ids
from ringspark.pipelines import storage
from ringspark.pipelines.table_files import TableSource
from ringspark.pipelines.typed_json import parse_object, record


def fit_on_parquet(estimator: Any, uri: str) -> Any:
    spark = active_session()
    return _in_place(estimator)._fit(read_parquet(spark, uri))


def fit_on_delta(estimator: Any, uri: str, version: Any) -> Any:
    spark = active_session()
    return _fit_listing(estimator, spark, list_delta(spark, uri, _version(estimator, spark, version)))


def fit_on_table(estimator: Any, name: str, version: Any) -> Any:
    spark = active_session()
    found = find_table(spark, name, _version(estimator, spark, version))
    if isinstance(found, Listing):
        return _fit_listing(estimator, spark, found)
    return _in_place(estimator)._fit(found)


def _in_place(estimator: Any) -> Any:
    return estimator.copy({estimator.data: "inPlace"})


def _fit_listing(given: Any, spark: SparkSession, listing: Listing) -> Any:
    _check_pinned(given._run_uri(spark), listing.source)
    estimator = _in_place(given)
    estimator._source = listing.source
    with reads_field_ids(spark, listing):
        return estimator._fit(read_listing(spark, listing))


def _version(estimator: Any, spark: SparkSession, given: Any) -> Any:
    """Returns the version to read: the given one, else the one that the run began with."""
    return _pinned_source(estimator._run_uri(spark)) if given is None else given


def _pinned_source(run_uri: str | None) -> TableSource | None:
    """Returns the version of a table that a run's first start read; None if there is no such run."""
    if run_uri is None or not storage.exists(uri := storage.join(run_uri, run_layout.SOURCE)):
        return None
    return record(TableSource, parse_object(storage.read_bytes(uri)))


def _check_pinned(run_uri: str | None, source: TableSource) -> None:
    """Raises RunRefusedError if a run began with another table, or another version of the table."""
    known = _pinned_source(run_uri)
    # If an explicit version has other names, the checks of the columns say so.
    if run_uri is not None and known is not None and replace(known, schema_id=source.schema_id) != source:
        before, now = (f"{table.uri!r} version {table.version}" for table in (known, source))
        raise RunFolder(run_uri, is_given=True).refusal([f"data: the table {before} -> {now}"])


def keep_source(run_uri: str, source: TableSource) -> None:
    """Writes which version of a table a run reads, so that a resume reads the same version."""
    storage.write_atomic(storage.join(run_uri, run_layout.SOURCE), json.dumps(asdict(source)).encode())
