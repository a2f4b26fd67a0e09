"""Strategies that spread a network over the ranks: one file per strategy, one registry."""

from collections.abc import Mapping

from ringspark.estimators.lazy_imports import LazyRegistry
from ringspark.estimators.parallel.base import Strategy
from ringspark.estimators.parallel.exchange import Exchange

STRATEGIES: Mapping[str, type[Strategy]] = LazyRegistry(
    {
        "data_parallel": "ringspark.estimators.parallel.data.data_parallel:DataParallel",
        "compressed": "ringspark.estimators.parallel.data.compressed_sum:CompressedGradients",
        "zero1": "ringspark.estimators.parallel.sharded.zero:ShardedOptimizer",
        "zero2": "ringspark.estimators.parallel.sharded.zero:ShardedGradients",
        "zero3": "ringspark.estimators.parallel.sharded.fully_sharded:FullySharded",
        "parameter_server": "ringspark.estimators.parallel.server.parameter_server:ParameterServer",
        "hogwild": "ringspark.estimators.parallel.server.hogwild:Hogwild",
        "local_average": "ringspark.estimators.parallel.local.averaging:LocalAveraging",
        "diloco": "ringspark.estimators.parallel.local.diloco:DiLoCo",
        "elastic": "ringspark.estimators.parallel.local.elastic:Elastic",
    }
)

__all__ = ["STRATEGIES", "Exchange", "Strategy"]
