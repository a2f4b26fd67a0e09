"""Writes shards: from a DataFrame to committed Parquet files and their manifest."""
