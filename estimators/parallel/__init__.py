"""Strategies that spread a network over the ranks: one file per strategy, one registry."""

from ringspark.estimators.lazy_imports import LazyRegistry
from ringspark.estimators.parallel.base import Strategy
from ringspark.estimators.parallel.exchange import Exchange

STRATEGIES: LazyRegistry[type[Strategy]] = LazyRegistry(
    {
        "data_parallel": "ringspark.estimators.parallel.data.data_parallel:DataParallel",
        "compressed": "ringspark.estimators.parallel.data.compressed_sum:CompressedGradients",
        "zero1": "ringspark.estimators.parallel.sharded.zero:ShardedOptimizer",
        "zero2": "ringspark.estimators.parallel.sharded.zero:ShardedGradients",
        "zero3": "ringspark.estimators.parallel.sharded.fully_sharded:FullySharded",
        "parameter_server": "ringspark.extras.asynchronous.parameter_server:ParameterServerStrategy",
        "hogwild": "ringspark.extras.asynchronous.hogwild:HogwildStrategy",
        "local_average": "ringspark.extras.local_sgd.averaging:LocalAveraging",
        "diloco": "ringspark.extras.local_sgd.diloco:DiLoCoStrategy",
        "elastic": "ringspark.extras.local_sgd.elastic:ElasticStrategy",
    }
)

__all__ = ["STRATEGIES", "Exchange", "Strategy"]
