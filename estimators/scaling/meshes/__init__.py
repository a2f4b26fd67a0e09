"""Chooses how the workers of a training share its network: `plan_parallelism`, and `parallelism="auto"`."""

from ringspark.estimators.scaling.meshes.plan import plan_parallelism
from ringspark.estimators.scaling.meshes.report import MeshPlan, ParallelismPlan

__all__ = ["MeshPlan", "ParallelismPlan", "plan_parallelism"]
