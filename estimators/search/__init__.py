"""Moved to `ringspark.extras.search`."""

from ringspark.estimators.lazy_imports import forward_to

__getattr__ = forward_to("ringspark.extras.search")
