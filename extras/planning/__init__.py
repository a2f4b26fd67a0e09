"""Predicts how a training scales with the number of workers, from calibration runs or from given numbers."""

from ringspark.extras.planning.exchange_time import Link
from ringspark.extras.planning.fit import FORMS, ScalingFit, fit_scaling
from ringspark.extras.planning.meshes.plan import plan_parallelism
from ringspark.extras.planning.meshes.report import MeshPlan, ParallelismPlan
from ringspark.extras.planning.plan import plan_scaling
from ringspark.extras.planning.report import ScalingPlan

__all__ = [
    "FORMS",
    "Link",
    "MeshPlan",
    "ParallelismPlan",
    "ScalingFit",
    "ScalingPlan",
    "fit_scaling",
    "plan_parallelism",
    "plan_scaling",
]
