"""Chooses the mesh of a training: `plan_parallelism`, and `parallelism="auto"`."""

from ringspark.extras.planning.meshes.plan import plan_parallelism
from ringspark.extras.planning.meshes.report import MeshPlan, ParallelismPlan

__all__ = ["MeshPlan", "ParallelismPlan", "plan_parallelism"]
