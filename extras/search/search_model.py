"""`SearchModel`: the best model of a search, and the results of all its trainings."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import pandas as pd
from pyspark.ml import Model
from pyspark.ml.util import MLReadable, MLReader, MLWritable
from pyspark.sql import DataFrame
from pyspark.sql.types import StructType

from ringspark.estimators.stages.declared import DeclaredParams
from ringspark.estimators.stages.persistence import Description, StageReader
from ringspark.extras.search.saved_search import SearchWriter, load_part
from ringspark.extras.search.trial_table import in_words, table_of

BEST_MODEL = "best-model"


@dataclass(frozen=True, kw_only=True)
class SearchDescription(Description):
    trials: tuple[dict[str, Any], ...]
    best_params: dict[str, Any]


class SearchModel(DeclaredParams, Model, MLWritable, MLReadable["SearchModel"]):
    """The result of a search. `transform` uses the best model."""

    _description = SearchDescription

    def __init__(self) -> None:
        super().__init__()
        self._best_model: Any = None
        self._best_params: dict[str, Any] = {}
        self._rows: tuple[dict[str, Any], ...] = ()

    @property
    def bestModel(self) -> Any:
        """Model of the best training."""
        if self._best_model is None:
            raise ValueError("SearchModel has no model; get one from a search's fit or from load()")
        return self._best_model

    @property
    def bestParams(self) -> dict[str, Any]:
        """Values that the search chose for the best training, by name."""
        return dict(self._best_params)

    @property
    def trials(self) -> pd.DataFrame:
        """One line per training: its state, value, parameters, seconds, epochs, and the reason if it failed.

        The state is "complete", "pruned" or "failed". The value of a pruned trial is `monitor` after the last
        epoch that the pruner saw, even if an evaluator rates complete trials. With `OptunaSearch` a line is a
        trial, with its number. With `PopulationSearch` a line is one member in one round, with the number of
        the member that it copied.
        """
        return table_of(self._rows)

    def copy(self, extra: Any = None) -> SearchModel:
        """Returns a copy; `extra` is passed to the copy of the best model."""
        made: SearchModel = super().copy(None)
        if self._best_model is not None:
            made._best_model = self._best_model.copy(extra)
        return made

    def transformSchema(self, schema: StructType) -> StructType:
        found: StructType = self.bestModel.transformSchema(schema)
        return found

    def write(self) -> SearchWriter:
        return SearchWriter(
            self,
            {BEST_MODEL: self.bestModel},
            {"trials": list(self._rows), "best_params": in_words(self._best_params)},
        )

    @classmethod
    def read(cls) -> MLReader[SearchModel]:
        return StageReader(cls)

    def _transform(self, dataset: DataFrame) -> DataFrame:
        found: DataFrame = self.bestModel.transform(dataset)
        return found

    def _set_found(self, model: Any, params: dict[str, Any], rows: Sequence[dict[str, Any]]) -> SearchModel:
        self._best_model, self._best_params, self._rows = model, dict(params), tuple(rows)
        return self

    def _restore(self, uri: str, description: SearchDescription) -> None:
        self._set_found(load_part(uri, BEST_MODEL), description.best_params, description.trials)
