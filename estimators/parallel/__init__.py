"""Gradient synchronization: one file per strategy, one registry."""

from torch import nn

from ringspark.estimators.lazy_imports import LazyRegistry
from ringspark.estimators.parallel.base import GradientSync, MakeOptimizer, SyncSettings
from ringspark.estimators.parallel.mesh import RankMesh

STRATEGIES: LazyRegistry[type[GradientSync]] = LazyRegistry(
    {
        "data_parallel": "ringspark.estimators.parallel.data.gradient_all_reduce:GradientAllReduce",
        "compressed": "ringspark.extras.compressors.compressed_all_reduce:CompressedAllReduce",
        "cpsgd": "ringspark.extras.compressors.cpsgd:NoisyAllReduce",
        "zero1": "ringspark.estimators.parallel.sharded.zero:ZeroSync",
        "zero2": "ringspark.estimators.parallel.sharded.zero:ZeroGradientSync",
        "zero3": "ringspark.estimators.parallel.sharded.fully_sharded:FsdpSync",
        "parameter_server": "ringspark.extras.asynchronous.parameter_server:ServedSync",
        "hogwild": "ringspark.extras.asynchronous.hogwild:HogwildSync",
        "local_average": "ringspark.extras.local_sgd.averaging:AveragedWeights",
        "diloco": "ringspark.extras.local_sgd.diloco:OuterSync",
        "elastic": "ringspark.extras.local_sgd.elastic:ElasticSync",
    }
)

_EXPERTS = "ringspark.extras.model_parallel.expert_sync"
# These replace the strategy of the same name if ranks have different experts.
EXPERT_STRATEGIES: LazyRegistry[type[GradientSync]] = LazyRegistry(
    {
        "data_parallel": f"{_EXPERTS}:ExpertAllReduce",
        "zero1": f"{_EXPERTS}:ExpertZeroSync",
        "zero2": f"{_EXPERTS}:ExpertZeroGradientSync",
    }
)

__all__ = ["STRATEGIES", "SyncSettings", "synchronize_gradients"]


def synchronize_gradients(
    module: nn.Module, make_optimizer: MakeOptimizer, mesh: RankMesh, settings: SyncSettings
) -> GradientSync:
    """Prepares gradient synchronization by the settings' strategy. Runs on every rank."""
    # With a compression all ranks decide together on each step, so ranks without trained parameters do too.
    if settings.sync.compressed is not None or any(p.requires_grad for p in module.parameters()):
        name = settings.sync.strategy
        has_experts = mesh.sizes.get("expert", 1) > 1 and name in EXPERT_STRATEGIES
        strategy = (EXPERT_STRATEGIES if has_experts else STRATEGIES)[name]
        sync = strategy.prepare(module, make_optimizer, mesh, settings)
    else:
        # A stage of a pipeline whose parameters are all frozen, on every rank that has the stage.
        sync = GradientSync(module, make_optimizer(module))
    # Ranks hold different shards of the gradients, so they must agree on overflow.
    sync.ranks_differ |= mesh.cuts_network
    return sync
