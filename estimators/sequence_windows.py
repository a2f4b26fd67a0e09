"""Moved to `ringspark.extras.windows.sequence_windows`."""

from ringspark.estimators.lazy_imports import forward_to

__getattr__ = forward_to("ringspark.extras.windows.sequence_windows")
