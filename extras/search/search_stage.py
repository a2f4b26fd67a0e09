"""Base class of the searches as Spark ML stages."""

from __future__ import annotations

import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple, TypeVar

from pyspark.ml import Estimator
from pyspark.ml.util import MLReadable, MLReader, MLWritable
from pyspark.sql import DataFrame
from pyspark.sql import functions as F

from ringspark.estimators.checked_fit import CheckedFit
from ringspark.estimators.held_out_rows import hold_out_at_random
from ringspark.estimators.prepared_fit import TABLE_COLUMN
from ringspark.estimators.run_layout import IDENTITY
from ringspark.estimators.stages.persistence import Description, StageReader
from ringspark.estimators.techniques import techniques_in
from ringspark.estimators.torch_estimator import _TorchEstimator
from ringspark.extras.search.population_loop import ROUND, STATE
from ringspark.extras.search.saved_search import SearchWriter, load_part
from ringspark.extras.search.search_params import SearchParams
from ringspark.extras.search.study import JOURNAL
from ringspark.extras.search.trial_data import SHARDS
from ringspark.pipelines import storage
from ringspark.pipelines.columns import quote
from ringspark.pipelines.fixed_rows import fix_rows
from ringspark.pipelines.spark_paths import resolve

S = TypeVar("S", bound="SearchStage")

_PARTS = ("estimator", "evaluator")
# Prefixes of file names that only one class of search writes.
_MARKS = {JOURNAL, STATE, f"{ROUND}-"}


class SplitRows(NamedTuple):
    """Training rows of a search, and the rows for its evaluator."""

    training: DataFrame
    held_out: DataFrame | None = None
    num_rows: int | None = None
    """Number of rows to train on, if the search itself has split the rows."""


class SearchStage(SearchParams, Estimator, MLWritable, MLReadable[Any]):  # type: ignore[type-arg]
    def copy(self: S, extra: Any = None) -> S:
        """Returns a copy of the search and of its estimator; each takes its own Params from `extra`."""
        extra = dict(extra or {})
        own = {param: value for param, value in extra.items() if param.parent == self.uid}
        made: S = super().copy(own)
        if made.isDefined(made.estimator):
            inner = made.getEstimator()
            theirs = {param: value for param, value in extra.items() if inner.hasParam(param.name)
                      and param.parent == inner.uid}  # fmt: skip
            made._set(estimator=inner.copy(theirs))
        return made

    def write(self) -> SearchWriter:
        return SearchWriter(self, {name: getattr(self, f"get{name.title()}")() for name in _PARTS})

    @classmethod
    def read(cls: type[S]) -> MLReader[S]:
        return StageReader(cls)

    def _restore(self, uri: str, description: Description) -> None:
        for name in _PARTS:
            self._set(**{name: load_part(uri, name)})

    def _checked_estimator(self) -> Any:
        estimator, search = self.getEstimator(), type(self).__name__
        if not isinstance(estimator, _TorchEstimator):
            given = "none" if estimator is None else f"a {type(estimator).__name__}"
            raise ValueError(
                f"{search} needs an estimator of ringspark, such as a TorchClassifier, got {given}; put "
                "other stages before the search, into its Pipeline"
            )
        for technique in techniques_in(estimator):
            technique.check_many(estimator, search)
        for name in ("runUri", "resume"):
            if estimator.isSet(name):
                raise ValueError(f"the estimator of a search must not set {name}; give the search a runUri")
        # A copy stores for its trackers what only this thread knows, such as MLflow's active run, so that it
        # becomes the parent of trainings in other threads.
        return estimator.copy()

    def _held_space(self) -> Any:
        if not self.isDefined(self.space):
            raise ValueError(
                f"{type(self).__name__} needs a space, such as "
                "{'learningRate': Uniform(1e-4, 1e-1, log=True)}"
            )
        return self.getOrDefault(self.space)

    def _checked_run(self, dataset: DataFrame, *known: str) -> str | None:
        """Returns the search's folder and creates the folder if needed; None if `runUri` is unset.

        `known` are prefixes of the file names that only this class of search writes.
        """
        given = self.getRunUri()
        if given is None:
            return None
        run_uri = storage.normalize(resolve(dataset.sparkSession, given))
        self._check_store(run_uri)
        storage.check_writable(run_uri)
        names = storage.list_names(run_uri)
        others = [name for name in names if name.startswith((IDENTITY, *_MARKS.difference(known)))]
        # OWNER does not mark a search, because the folder of a training has it too.
        if not any(name.startswith((f"{SHARDS}-", *known)) for name in names):
            others += names
        if others:
            raise ValueError(
                f"runUri must be a new or empty folder or hold a search by {type(self).__name__}, but "
                f"{run_uri!r} holds {others[0]!r}; set another folder"
            )
        storage.make_dirs(run_uri)
        return run_uri

    def _check_store(self, run_uri: str) -> None:
        """Raises ValueError if the folder is in a store that the search cannot use."""

    @contextmanager
    def _split(self, dataset: DataFrame, fit: CheckedFit) -> Iterator[SplitRows]:
        if self.getEvaluator() is None:
            yield SplitRows(dataset)
            return
        # Without a model, fit has fixed the rows already.
        dataset = dataset if TABLE_COLUMN in dataset.columns else fix_rows(dataset)
        indicator = fit.data.validation_col
        if indicator is not None:
            yield SplitRows(dataset, dataset.where(F.col(quote(indicator)).cast("boolean")))
            return
        # Another seed than the estimator's keeps its validationFraction independent.
        seed = zlib.crc32(f"held out {self.getSeed()}".encode())
        split = hold_out_at_random(dataset, dataset.columns, 1 - self.getTrainRatio(), seed)
        is_held_out = F.col(quote(split.indicator))
        held_out = split.dataset.where(is_held_out).drop(split.indicator).persist()
        try:
            rows = dataset.count() - held_out.count()
            yield SplitRows(split.dataset.where(~is_held_out).drop(split.indicator), held_out, rows)
        finally:
            held_out.unpersist()
