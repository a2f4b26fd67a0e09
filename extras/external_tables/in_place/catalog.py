"""Finds a table by its name, in Spark's catalogs and in pyiceberg's."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any

from ringspark.extras.external_tables.in_place.delta import list_delta
from ringspark.extras.external_tables.in_place.listing import Listing
from ringspark.extras.iceberg import list_iceberg
from ringspark.pipelines.columns import quote
from ringspark.pipelines.table_files import TableSource

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

_DETAILS = "# Detailed Table Information"


def find_table(
    spark: SparkSession, name: str, version: int | str | TableSource | None = None
) -> Listing | DataFrame:
    """Lists the files of a Delta or Iceberg table, by one version; returns a DataFrame of a Parquet table.

    pyiceberg finds an Iceberg table by the same name.

    Args:
        name: Name of the table, such as "catalog.schema.table".
        version: As for `list_delta`; for an Iceberg table, the ID of a snapshot or a time. A source of an
            earlier listing means the same version with the same names.

    Raises:
        ValueError: No catalog has the table, or it is a view, or its format or version cannot be read.
    """
    parts = [part.strip("`") for part in re.findall(r"`[^`]+`|[^.`]+", name)]
    if not parts or "" in parts:
        raise ValueError(f"a table needs a name such as 'catalog.schema.table', got {name!r}")
    details = _describe(spark, parts)
    # Other writers of Iceberg leave only this property in a metastore.
    metadata = re.search(r"\bmetadata_location=([^,\]]+)", (details or {}).get("table properties", ""))
    if details is None or details.get("provider") == "iceberg" or metadata:
        found = f"{name!r} is an Iceberg table" if details else f"Spark's catalogs have no table {name!r}"
        return _list_iceberg(spark, found, parts, version, metadata and metadata[1])
    if isinstance(version, TableSource):
        version = version.version
    provider, kind = details.get("provider", ""), details.get("type", "view").lower()
    if kind not in ("managed", "external"):
        raise ValueError(
            f"{name!r} is a {kind.replace('_', ' ')}, which has no files; use fit(spark.table({name!r}))"
        )
    if provider == "delta":
        return list_delta(spark, details["location"], version)
    if provider != "parquet":
        raise ValueError(
            f"table {name!r} has the format {provider or 'unknown'!r}, and only Parquet, Delta and Iceberg "
            f"tables are read in place; use fit(spark.table({name!r}))"
        )
    if version is not None:
        raise ValueError(
            f"table {name!r} has Parquet files, which have no versions; leave out version={version!r}"
        )
    return spark.table(_quote(parts))


def _describe(spark: SparkSession, parts: list[str]) -> dict[str, str] | None:
    """Returns what Spark's catalog says about a table, by lower-case key; None if it has no such table."""
    from pyspark.errors import AnalysisException

    try:
        if not spark.catalog.tableExists(_quote(parts)):
            return None
    except AnalysisException:  # Spark has no such catalog
        return None
    except Exception as error:  # py4j's or Spark Connect's
        if "DATA_SOURCE_NOT_FOUND" not in str(error):
            raise
        return _show(spark, parts)
    rows = spark.sql(f"DESCRIBE TABLE EXTENDED {_quote(parts)}").collect()
    keys = [row[0] for row in rows]
    # A temporary view has no details. Before them, there may be columns of any name.
    details = rows[keys.index(_DETAILS) + 1 :] if _DETAILS in keys else []
    return {row[0].lower(): row[1].lower() if row[0] == "Provider" else row[1] for row in details}


def _show(spark: SparkSession, parts: list[str]) -> dict[str, str]:
    """Returns the same as `_describe` for a table of a connector that Spark lacks."""
    schema = f"IN {_quote(parts[:-1])} " if parts[1:] else ""
    rows = spark.sql(f"SHOW TABLE EXTENDED {schema}LIKE '{parts[-1]}'").collect()
    lines = rows[0]["information"].partition("\nSchema: ")[0].splitlines()
    details = {key.lower(): value for key, _, value in (line.partition(": ") for line in lines)}
    return details | {"provider": details["provider"].lower()}


def _quote(parts: list[str]) -> str:
    return ".".join(map(quote, parts))


def _list_iceberg(spark: SparkSession, found: str, parts: list[str], *of_table: Any) -> Listing:
    try:
        import pyiceberg  # noqa: F401
    except ImportError:
        raise ValueError(
            f"{found}, and Iceberg tables need the package pyiceberg; check the name, or pip install "
            "'ringspark[iceberg]'"
        ) from None
    listing = list_iceberg(spark, parts, *of_table)
    if listing is None:
        raise ValueError(
            f"{found}, and pyiceberg finds no Iceberg table of this name; check the name, and pyiceberg's "
            f"configuration of the catalog {parts[0]!r} (such as PYICEBERG_CATALOG__{parts[0].upper()}__URI)"
        )
    return listing
