"""Gradient compressors for special cases; see `ringspark.estimators.collectives.compressors`."""
