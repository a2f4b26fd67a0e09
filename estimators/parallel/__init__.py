"""Strategies that spread a network over the ranks: one file per strategy, one registry."""

from ringspark.estimators.parallel.base import Strategy
from ringspark.estimators.parallel.data.compressed_sum import CompressedGradients
from ringspark.estimators.parallel.data.data_parallel import DataParallel
from ringspark.estimators.parallel.exchange import Exchange
from ringspark.estimators.parallel.local.averaging import LocalAveraging
from ringspark.estimators.parallel.local.diloco import DiLoCo
from ringspark.estimators.parallel.local.elastic import Elastic
from ringspark.estimators.parallel.server.hogwild import Hogwild
from ringspark.estimators.parallel.server.parameter_server import ParameterServer
from ringspark.estimators.parallel.sharded.fully_sharded import FullySharded
from ringspark.estimators.parallel.sharded.zero import ShardedGradients, ShardedOptimizer

STRATEGIES: dict[str, type[Strategy]] = {
    "data_parallel": DataParallel,
    "compressed": CompressedGradients,
    "zero1": ShardedOptimizer,
    "zero2": ShardedGradients,
    "zero3": FullySharded,
    "parameter_server": ParameterServer,
    "hogwild": Hogwild,
    "local_average": LocalAveraging,
    "diloco": DiLoCo,
    "elastic": Elastic,
}

__all__ = [
    "STRATEGIES",
    "DataParallel",
    "DiLoCo",
    "Elastic",
    "Exchange",
    "FullySharded",
    "Hogwild",
    "LocalAveraging",
    "ParameterServer",
    "ShardedGradients",
    "ShardedOptimizer",
    "Strategy",
]
