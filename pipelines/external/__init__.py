"""Parquet tables of other writers, read where they lie: from a folder or a Delta table to a manifest."""
