"""`OptunaSearchModel`: the best trial's model, and what became of all trials."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import pandas as pd
from pyspark.ml import Model
from pyspark.ml.util import MLReadable, MLReader, MLWritable
from pyspark.sql import DataFrame
from pyspark.sql.types import StructType

from ringspark.estimators.search.saved_search import SearchWriter, load_part
from ringspark.estimators.search.trial_table import table_of
from ringspark.estimators.stages.declared import DeclaredParams
from ringspark.estimators.stages.persistence import Description, StageReader

BEST_MODEL = "best-model"


@dataclass(frozen=True, kw_only=True)
class SearchDescription(Description):
    """The description of a saved search's result.

    Attributes:
        trials: One entry per trial, see `trial_table.rows_of`.
        best_params: Values of the best trial, in words where JSON has no form of them.
    """

    trials: tuple[dict[str, Any], ...]
    best_params: dict[str, Any]


class OptunaSearchModel(DeclaredParams, Model, MLWritable, MLReadable["OptunaSearchModel"]):
    """The result of a search. `transform` is the best model's."""

    _description = SearchDescription

    def __init__(self) -> None:
        super().__init__()
        self._best_model: Any = None
        self._best_params: dict[str, Any] = {}
        self._rows: tuple[dict[str, Any], ...] = ()

    @property
    def bestModel(self) -> Any:
        """The best trial's model."""
        if self._best_model is None:
            raise ValueError("OptunaSearchModel has no model; get one from a search's fit or from load()")
        return self._best_model

    @property
    def bestParams(self) -> dict[str, Any]:
        """The best trial's values by name."""
        return dict(self._best_params)

    @property
    def trials(self) -> pd.DataFrame:
        """One line per trial: number, state, value, its parameters, seconds, epochs, and why it failed.

        The state is "complete", "pruned" or "failed". A pruned trial's value is that of its last epoch that
        counted.
        """
        return table_of(self._rows)

    def copy(self, extra: Any = None) -> OptunaSearchModel:
        """Returns a copy; `extra` goes to the copy of the best model."""
        made: OptunaSearchModel = super().copy(None)
        if self._best_model is not None:
            made._best_model = self._best_model.copy(extra)
        return made

    def transformSchema(self, schema: StructType) -> StructType:
        """Returns the schema of `transform`'s result for a DataFrame with `schema`."""
        found: StructType = self.bestModel.transformSchema(schema)
        return found

    def write(self) -> SearchWriter:
        """Returns a writer; its `overwrite()` replaces an existing stage."""
        return SearchWriter(
            self,
            {BEST_MODEL: self.bestModel},
            {"trials": list(self._rows), "best_params": _in_words(self._best_params)},
        )

    @classmethod
    def read(cls) -> MLReader[OptunaSearchModel]:
        return StageReader(cls)

    def _transform(self, dataset: DataFrame) -> DataFrame:
        found: DataFrame = self.bestModel.transform(dataset)
        return found

    def _set_found(
        self, model: Any, params: dict[str, Any], rows: Sequence[dict[str, Any]]
    ) -> OptunaSearchModel:
        self._best_model, self._best_params, self._rows = model, dict(params), tuple(rows)
        return self

    def _restore(self, uri: str, description: SearchDescription) -> None:
        """Restores a saved stage; the reader calls it with the stage's folder."""
        self._set_found(load_part(uri, BEST_MODEL), description.best_params, description.trials)


def _in_words(values: dict[str, Any]) -> dict[str, Any]:
    plain = (bool, int, float, str, list, dict, type(None))
    return {name: value if isinstance(value, plain) else repr(value) for name, value in values.items()}
