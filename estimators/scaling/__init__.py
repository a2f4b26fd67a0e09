"""Predicts how a training scales over workers: from a few measurements here, or from numbers of elsewhere."""

from ringspark.estimators.scaling.exchange_time import Link
from ringspark.estimators.scaling.fit import FORMS, ScalingFit, fit_scaling
from ringspark.estimators.scaling.meshes import MeshPlan, ParallelismPlan, plan_parallelism
from ringspark.estimators.scaling.plan import plan_scaling
from ringspark.estimators.scaling.report import ScalingPlan

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
