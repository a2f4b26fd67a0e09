"""Manifests of Parquet and Delta tables, for readers and dataloaders without a training."""

from ringspark.extras.external_tables.in_place.listing import list_parquet
from ringspark.extras.external_tables.manifest import table_manifest

__all__ = ["list_parquet", "table_manifest"]
