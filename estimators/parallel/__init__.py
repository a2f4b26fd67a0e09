"""Strategies that spread a network over the ranks: one file per strategy, one registry."""

from ringspark.estimators.parallel.base import Strategy
from ringspark.estimators.parallel.data.data_parallel import DataParallel
from ringspark.estimators.parallel.sharded.fully_sharded import FullySharded
from ringspark.estimators.parallel.sharded.zero import ShardedGradients, ShardedOptimizer

STRATEGIES: dict[str, type[Strategy]] = {
    "data_parallel": DataParallel,
    "zero1": ShardedOptimizer,
    "zero2": ShardedGradients,
    "zero3": FullySharded,
}

_OF_SHARDING = {"none": "data_parallel", "optimizer": "zero1", "gradients": "zero2", "parameters": "zero3"}


def strategy_key(sharding: str) -> str:
    """Returns the key of `STRATEGIES` that the settings ask for."""
    return _OF_SHARDING[sharding]


__all__ = [
    "STRATEGIES",
    "DataParallel",
    "FullySharded",
    "ShardedGradients",
    "ShardedOptimizer",
    "Strategy",
    "strategy_key",
]
