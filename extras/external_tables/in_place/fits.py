"""Fits of an estimator on an external table: `fitOnParquet`, `fitOnDelta` and `fitOnTable`."""

from __future__ import annotations

from typing import Any

from pyspark.sql import SparkSession

from ringspark.estimators.stages.storage_root import active_session
from ringspark.extras.external_tables.in_place.catalog import find_table
from ringspark.extras.external_tables.in_place.delta import list_delta
from ringspark.extras.external_tables.in_place.listing import Listing, read_parquet
from ringspark.extras.external_tables.in_place.table_frame import read_listing, reads_field_ids
from ringspark.extras.external_tables.in_place.tables import check_pinned, pinned_source


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
    check_pinned(given._run_uri(spark), listing.source)
    estimator = _in_place(given)
    estimator._source = listing.source
    with reads_field_ids(spark, listing):
        return estimator._fit(read_listing(spark, listing))


def _version(estimator: Any, spark: SparkSession, given: Any) -> Any:
    """Returns the version to read: the given one, else the one that the run began with."""
    return pinned_source(estimator._run_uri(spark)) if given is None else given
