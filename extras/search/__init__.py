"""Hyperparameter search: trainings run concurrently, and the data is written once for all of them.

Each name is imported when it is first used. Only `OptunaSearch` needs optuna.
"""

from typing import TYPE_CHECKING

from ringspark.lazy_names import export_lazily

if TYPE_CHECKING:
    from ringspark.extras.search.optuna_search import OptunaSearch as OptunaSearch
    from ringspark.extras.search.population_search import PopulationSearch as PopulationSearch
    from ringspark.extras.search.ranges import Choice as Choice
    from ringspark.extras.search.ranges import IntRange as IntRange
    from ringspark.extras.search.ranges import Uniform as Uniform
    from ringspark.extras.search.search_model import SearchModel as SearchModel

__getattr__, __dir__, __all__ = export_lazily(__name__)
