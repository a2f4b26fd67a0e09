"""How a network is spread over the ranks: one file a strategy, keyed by the setting `sharding`."""

from ringspark.estimators.parallel.base import Strategy
from ringspark.estimators.parallel.data.data_parallel import DataParallel
from ringspark.estimators.parallel.sharded.fully_sharded import FullySharded
from ringspark.estimators.parallel.sharded.zero import ShardedGradients, ShardedOptimizer
from ringspark.estimators.parallel.state_bytes import StateBytes, state_bytes

STRATEGIES: dict[str, type[Strategy]] = {
    "none": DataParallel,
    "optimizer": ShardedOptimizer,
    "gradients": ShardedGradients,
    "parameters": FullySharded,
}

__all__ = [
    "STRATEGIES",
    "DataParallel",
    "FullySharded",
    "ShardedGradients",
    "ShardedOptimizer",
    "StateBytes",
    "Strategy",
    "state_bytes",
]
