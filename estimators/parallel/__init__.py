"""How a network is spread over the ranks: one file a strategy."""

from ringspark.estimators.parallel.base import Strategy
from ringspark.estimators.parallel.data_parallel import DataParallel

STRATEGIES: dict[str, type[Strategy]] = {"data_parallel": DataParallel}

__all__ = ["STRATEGIES", "DataParallel", "Strategy"]
