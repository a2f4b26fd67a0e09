"""Tensor parallelism: each rank has a shard of every large matrix, and computes with all rows."""

from ringspark.extras.model_parallel.tensor.grid import make_mesh_grids
from ringspark.extras.model_parallel.tensor.layers import Region, VocabularyEmbedding
from ringspark.extras.model_parallel.tensor.loss import ShardedCrossEntropy, ShardedScores, scores_of
from ringspark.extras.model_parallel.tensor.plan import (
    check_sequence_parallel,
    make_region,
    plan_of,
    shard_activations,
    shard_layers,
)
from ringspark.extras.model_parallel.tensor.sequence_parallel import PartialGradients, SequenceShardedRows

__all__ = [
    "PartialGradients",
    "Region",
    "SequenceShardedRows",
    "ShardedCrossEntropy",
    "ShardedScores",
    "VocabularyEmbedding",
    "check_sequence_parallel",
    "make_mesh_grids",
    "make_region",
    "plan_of",
    "scores_of",
    "shard_activations",
    "shard_layers",
]
