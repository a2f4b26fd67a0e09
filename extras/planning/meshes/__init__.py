"""Chooses how the workers of a training share its network: `plan_parallelism`, and `parallelism="auto"`."""

from ringspark.extras.planning.meshes.plan import plan_parallelism
from ringspark.extras.planning.meshes.report import MeshPlan, ParallelismPlan

__all__ = ["MeshPlan", "ParallelismPlan", "plan_parallelism"]
