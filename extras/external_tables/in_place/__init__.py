"""External tables: Parquet and Delta tables that other programs wrote, read in place with a manifest."""
