"""Moved to `ringspark.extras.report`."""

from ringspark.estimators.lazy_imports import forward_to

__getattr__ = forward_to("ringspark.extras.report")
