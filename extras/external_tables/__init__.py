"""Manifests of Parquet and Delta tables, for readers and dataloaders without a training."""

from ringspark.extras.external_tables.manifest import table_manifest
from ringspark.extras.external_tables.parquet_listing import list_parquet

__all__ = ["list_parquet", "table_manifest"]
