"""Hyperparameter search: trainings run concurrently, and the data is written once for all of them.

Each name is imported when it is first used. Only `OptunaSearch` needs optuna.
"""

from typing import TYPE_CHECKING

from ringspark.estimators.lazy_imports import make_getattr

if TYPE_CHECKING:
    from ringspark.extras.search.optuna_search import OptunaSearch
    from ringspark.extras.search.population_search import PopulationSearch
    from ringspark.extras.search.ranges import Choice, IntRange, Uniform
    from ringspark.extras.search.search_model import SearchModel

_PATHS = {
    "Choice": "ringspark.extras.search.ranges:Choice",
    "IntRange": "ringspark.extras.search.ranges:IntRange",
    "OptunaSearch": "ringspark.extras.search.optuna_search:OptunaSearch",
    "PopulationSearch": "ringspark.extras.search.population_search:PopulationSearch",
    "SearchModel": "ringspark.extras.search.search_model:SearchModel",
    "Uniform": "ringspark.extras.search.ranges:Uniform",
}

__all__ = ["Choice", "IntRange", "OptunaSearch", "PopulationSearch", "SearchModel", "Uniform"]


__getattr__ = make_getattr(__name__, _PATHS)


def __dir__() -> list[str]:
    return __all__
