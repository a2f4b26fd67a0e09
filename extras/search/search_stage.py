"""Base class of the searches as Spark ML stages."""

from __future__ import annotations

import zlib
from collections.abc import Iterator
from contextlib import closing, contextmanager
from typing import Any, ClassVar, TypeVar

from pyspark.ml import Estimator
from pyspark.ml.util import MLReadable, MLReader, MLWritable
from pyspark.sql import DataFrame
from pyspark.sql import functions as F

from ringspark.estimators.checked_fit import CheckedFit, check_settings
from ringspark.estimators.held_out_rows import hold_out_at_random
from ringspark.estimators.launch.python_daemon import choose_daemon
from ringspark.estimators.prepared_fit import TABLE_COLUMN, prepare_fit
from ringspark.estimators.run_layout import IDENTITY
from ringspark.estimators.stages.persistence import Description, StageReader
from ringspark.estimators.techniques import techniques_in
from ringspark.estimators.torch_estimator import _TorchEstimator
from ringspark.extras.search.objective import Objective
from ringspark.extras.search.population_loop import STATE
from ringspark.extras.search.saved_search import SearchWriter, load_part
from ringspark.extras.search.search_model import SearchModel
from ringspark.extras.search.search_params import SearchParams
from ringspark.extras.search.space import Space
from ringspark.extras.search.study import JOURNAL
from ringspark.extras.search.trainings import ROUND, Trainings
from ringspark.extras.search.trial_data import SHARDS, TrialData
from ringspark.pipelines import storage
from ringspark.pipelines.columns import check_frame, quote
from ringspark.pipelines.fixed_rows import fix_rows
from ringspark.pipelines.spark_paths import resolve

S = TypeVar("S", bound="SearchStage")

_PARTS = ("estimator", "evaluator")
# Prefixes of file names that only one class of search writes.
_MARKS = {JOURNAL, STATE, ROUND}


class SearchStage(SearchParams, Estimator, MLWritable, MLReadable[Any]):  # type: ignore[type-arg]
    """Base class of the searches.

    Attributes:
        MARKS: Prefixes of the file names that only this class of search writes.
    """

    MARKS: ClassVar[tuple[str, ...]] = ()

    def copy(self: S, extra: Any = None) -> S:
        """Returns a copy of the search and of its estimator; each takes its own Params from `extra`."""
        extra = dict(extra or {})
        own = {param: value for param, value in extra.items() if param.parent == self.uid}
        made: S = super().copy(own)
        if (inner := made.getEstimator()) is not None:
            theirs = {param: value for param, value in extra.items() if param.parent == inner.uid}
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

    def _fit(self, dataset: DataFrame) -> SearchModel:
        check_frame(dataset, f"{type(self).__name__}.fit")
        estimator = self._checked_estimator()
        given = self.getSpace()
        if given is None:
            raise ValueError(
                f"{type(self).__name__} needs a space, such as "
                "{'learningRate': Uniform(1e-4, 1e-1, log=True)}"
            )
        known = check_settings(estimator, dataset)
        self._check_space(Space(given, known), known.estimator)
        run_uri = self._checked_run(dataset)
        prepared = prepare_fit(estimator, dataset, search_uri=run_uri)
        dataset, space = prepared.dataset, Space(given, prepared)
        fit = CheckedFit.of(prepared.estimator, dataset)
        choose_daemon(dataset.sparkSession, fit.config.use_gpu)
        with (
            self._split(dataset, fit) as (training, held_out),
            closing(TrialData(training, run_uri)) as data,
        ):
            manifest = data.manifest(fit.data)
            if run_uri is not None:
                prepared.keep_plan(run_uri)
            objective = Objective.of(fit, manifest, self.getMonitor(), self.getEvaluator(), held_out)
            trainings = Trainings(space, objective, data)
            about = space.fixed_settings(fit, manifest)
            about |= {"space": space.text, "value": objective.text, "seed": str(self.getSeed())}
            loop = self._make_loop(trainings, fit.config.epochs, about)
            with trainings.owned():
                model, values, rows = loop.run(self.getParallelism())
        model._describe_columns(prepared.uses)
        found = SearchModel()._set_found(model, values, rows)
        found._resetUid(self.uid)
        return found

    def _check_space(self, space: Space, estimator: Any) -> None:
        """Raises ValueError if this class of search cannot vary the settings of the space."""

    def _make_loop(self, trainings: Trainings, epochs: int, about: dict[str, str]) -> Any:
        """Returns the loop; raises ValueError if the folder has a search with other settings than `about`."""
        raise NotImplementedError

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

    def _checked_run(self, dataset: DataFrame) -> str | None:
        """Returns the search's folder and creates the folder if needed; None if `runUri` is unset."""
        given = self.getRunUri()
        if given is None:
            return None
        run_uri = storage.normalize(resolve(dataset.sparkSession, given))
        self._check_store(run_uri)
        storage.check_writable(run_uri)
        names = storage.list_names(run_uri)
        others = [name for name in names if name.startswith((IDENTITY, *_MARKS.difference(self.MARKS)))]
        # OWNER does not mark a search, because the folder of a training has it too.
        if not any(name.startswith((f"{SHARDS}-", *self.MARKS)) for name in names):
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
    def _split(self, dataset: DataFrame, fit: CheckedFit) -> Iterator[tuple[DataFrame, DataFrame | None]]:
        """Yields the training rows, and the rows for the evaluator."""
        if self.getEvaluator() is None:
            yield dataset, None
            return
        # Without a model, fit has fixed the rows already.
        dataset = dataset if TABLE_COLUMN in dataset.columns else fix_rows(dataset)
        indicator = fit.data.validation_col
        if indicator is not None:
            yield dataset, dataset.where(F.col(quote(indicator)).cast("boolean"))
            return
        # Another seed than the estimator's keeps its validationFraction independent.
        seed = zlib.crc32(f"held out {self.getSeed()}".encode())
        split = hold_out_at_random(dataset, dataset.columns, 1 - self.getTrainRatio(), seed)
        is_held_out = F.col(quote(split.indicator))
        held_out = split.dataset.where(is_held_out).drop(split.indicator).persist()
        try:
            yield split.dataset.where(~is_held_out).drop(split.indicator), held_out
        finally:
            held_out.unpersist()
