"""Finds the memory of one rank's training step by a run on fake tensors, which allocate nothing."""

from ringspark.estimators.memory.budget import check_budget
from ringspark.estimators.memory.plan import plan_memory
from ringspark.estimators.memory.pressure import (
    check_on_driver,
    check_on_rank,
    is_on_driver,
    limits_on_driver,
)
from ringspark.estimators.memory.report import MemoryPlan

__all__ = [
    "MemoryPlan",
    "check_budget",
    "check_on_driver",
    "check_on_rank",
    "is_on_driver",
    "limits_on_driver",
    "plan_memory",
]
