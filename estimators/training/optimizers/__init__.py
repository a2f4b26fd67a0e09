"""Makes optimizers from a name or a factory, over one or several groups of parameters.

An optimizer is made after the module has its final form. The learning rate is the user's for any number of
ranks. An optimizer that torch lacks, or whose version does not fit, has its own file.
"""

from ringspark.estimators.names import check_name
from ringspark.estimators.training.optimizers.base import Parameters
from ringspark.estimators.training.optimizers.build import build_optimizer
from ringspark.estimators.training.optimizers.groups import GROUP_KEYS, check_groups, group_parameters
from ringspark.estimators.training.optimizers.registry import (
    ELEMENTWISE,
    OPTIMIZERS,
    Factory,
    make_optimizer,
)

__all__ = [
    "ELEMENTWISE",
    "GROUP_KEYS",
    "OPTIMIZERS",
    "Factory",
    "Parameters",
    "build_optimizer",
    "check_groups",
    "check_name",
    "group_parameters",
    "make_optimizer",
]
