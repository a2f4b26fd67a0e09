"""Hyperparameter search over gangs: trainings beside each other on one write of the data.

Each name is imported when it is asked for; only `OptunaSearch` needs optuna.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from ringspark.estimators.search.optuna_search import OptunaSearch
    from ringspark.estimators.search.population_search import PopulationSearch
    from ringspark.estimators.search.ranges import Choice, IntRange, Uniform
    from ringspark.estimators.search.search_model import SearchModel

_MODULES = {
    "Choice": "ranges",
    "IntRange": "ranges",
    "OptunaSearch": "optuna_search",
    "PopulationSearch": "population_search",
    "SearchModel": "search_model",
    "Uniform": "ranges",
}

__all__ = ["Choice", "IntRange", "OptunaSearch", "PopulationSearch", "SearchModel", "Uniform"]


def __getattr__(name: str) -> Any:
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_MODULES[name]}"), name)


def __dir__() -> list[str]:
    return __all__
