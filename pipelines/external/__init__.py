"""External tables: Parquet and Delta tables of other writers, read in place through a manifest."""
