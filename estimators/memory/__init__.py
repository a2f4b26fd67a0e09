"""What one training step takes on one rank, found on fake tensors: no memory is spent to know it."""

from ringspark.estimators.memory.budget import check_budget
from ringspark.estimators.memory.plan import plan_memory
from ringspark.estimators.memory.pressure import check_on_driver, check_on_rank
from ringspark.estimators.memory.report import MemoryPlan

__all__ = ["MemoryPlan", "check_budget", "check_on_driver", "check_on_rank", "plan_memory"]
