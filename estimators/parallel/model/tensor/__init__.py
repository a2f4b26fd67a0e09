"""Tensor parallelism: each rank has a part of every large matrix, and computes with all rows."""

from ringspark.estimators.parallel.model.tensor.between import PartRows
from ringspark.estimators.parallel.model.tensor.grid import MeshGrids
from ringspark.estimators.parallel.model.tensor.layers import Region, VocabularyEmbedding
from ringspark.estimators.parallel.model.tensor.loss import CutCrossEntropy, Scores, scores_of
from ringspark.estimators.parallel.model.tensor.partial import PartialGradients
from ringspark.estimators.parallel.model.tensor.plan import (
    check_parts,
    plan_of,
    region_of,
    spread_between,
    spread_tensor,
)

__all__ = [
    "CutCrossEntropy",
    "MeshGrids",
    "PartRows",
    "PartialGradients",
    "Region",
    "Scores",
    "VocabularyEmbedding",
    "check_parts",
    "plan_of",
    "region_of",
    "scores_of",
    "spread_between",
    "spread_tensor",
]
