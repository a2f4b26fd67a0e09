"""`OptunaSearch`: an estimator that searches the settings of another one.

`fit` promises this order: it checks names, ranges and the estimator's settings with the schema; it writes the
rows once, and checks them with the network; only then does a trial start.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import closing, contextmanager
from typing import Any

from pyspark.ml import Estimator
from pyspark.ml.util import MLReadable, MLReader, MLWritable
from pyspark.sql import DataFrame
from pyspark.sql import functions as F

from ringspark.estimators.checked_fit import CheckedFit
from ringspark.estimators.launch.python_daemon import choose_daemon
from ringspark.estimators.run_layout import OWNER
from ringspark.estimators.search.objective import Objective
from ringspark.estimators.search.saved_search import SearchWriter, load_part
from ringspark.estimators.search.search_model import OptunaSearchModel
from ringspark.estimators.search.search_params import _SearchParams
from ringspark.estimators.search.space import Space
from ringspark.estimators.search.study import JOURNAL, check_choices, open_study, pruner_of, sampler_of
from ringspark.estimators.search.trial_data import TrialData
from ringspark.estimators.search.trial_loop import TrialLoop
from ringspark.estimators.search.trial_table import rows_of
from ringspark.estimators.stages.declared import set_params
from ringspark.estimators.stages.persistence import Description, StageReader
from ringspark.estimators.torch_estimator import _TorchEstimator
from ringspark.pipelines import storage
from ringspark.pipelines.columns import check_frame
from ringspark.pipelines.spark_paths import resolve

_PARTS = ("estimator", "evaluator")
_DRAW = "__ringspark_held_out"


class OptunaSearch(_SearchParams, Estimator, MLWritable, MLReadable["OptunaSearch"]):  # type: ignore[type-arg]
    """Fits copies of an estimator with settings that optuna draws; the best one is the model.

        search = OptunaSearch(
            estimator=TorchClassifier(model=network, validationFraction=0.2, metrics=["auroc"], epochs=8),
            space={"learningRate": Uniform(1e-4, 1e-1, log=True), "model.hidden": Choice([[32], [64, 64]])},
            monitor="validation_auroc",
            numTrials=40,
            parallelism=4,
            runUri="/shared/searches/first",
        )
        model = search.fit(df)
        model.bestParams, model.trials

    The keywords of the constructor are the Params: see `explainParams()`.
    """

    def __init__(self, **params: Any) -> None:
        super().__init__()
        set_params(self, params)

    def setParams(self, **params: Any) -> OptunaSearch:
        """Sets several Params at once."""
        set_params(self, params)
        return self

    def copy(self, extra: Any = None) -> OptunaSearch:
        """Returns a copy with a copy of the estimator, which takes its own Params of `extra`."""
        extra = dict(extra or {})
        own = {param: value for param, value in extra.items() if param.parent == self.uid}
        made: OptunaSearch = super().copy(own)
        if made.isDefined(made.estimator):
            inner = made.getEstimator()
            theirs = {param: value for param, value in extra.items() if inner.hasParam(param.name)
                      and param.parent == inner.uid}  # fmt: skip
            made._set(estimator=inner.copy(theirs))
        return made

    def write(self) -> SearchWriter:
        """Returns a writer; its `overwrite()` replaces an existing stage."""
        return SearchWriter(self, {name: getattr(self, f"get{name.title()}")() for name in _PARTS})

    @classmethod
    def read(cls) -> MLReader[OptunaSearch]:
        return StageReader(cls)

    def _restore(self, uri: str, description: Description) -> None:
        """Restores a saved stage; the reader calls it with the stage's folder."""
        for name in _PARTS:
            self._set(**{name: load_part(uri, name)})

    def _fit(self, dataset: DataFrame) -> OptunaSearchModel:
        check_frame(dataset, "OptunaSearch.fit")
        estimator = self._checked_estimator()
        check_choices(self.getSampler(), self.getPruner())
        space = Space(self._held_space(), estimator)
        run_uri = self._checked_run(dataset)
        fit = CheckedFit.of(estimator, dataset)
        choose_daemon(dataset.sparkSession, fit.config.use_gpu)
        with self._split(dataset, fit) as (training, held_out), closing(TrialData(training, run_uri)) as data:
            objective = Objective.of(
                fit, data.manifest(fit.data), self.getMonitor(), self.getEvaluator(), held_out
            )
            epochs = None if space.varies("epochs") else fit.config.epochs
            study = open_study(
                run_uri,
                objective.is_larger_better,
                pruner_of(self.getPruner(), epochs),
                {
                    "space": space.text,
                    "value": objective.text,
                    "sampler": _name(self.getSampler()),
                    "pruner": _name(self.getPruner()),
                    "seed": str(self.getSeed()),
                },
            )
            loop = TrialLoop(
                spark=dataset.sparkSession,
                study=study,
                make_sampler=lambda number: sampler_of(self.getSampler(), self.getSeed(), number),
                space=space,
                objective=objective,
                data=data,
                dataset=training,
                run_uri=run_uri,
            )
            loop.run(self.getNumTrials(), self.getParallelism())
            model, values = loop.best()
        found = OptunaSearchModel()._set_found(model, values, rows_of(study))
        found._resetUid(self.uid)
        return found

    def _checked_estimator(self) -> Any:
        estimator = self.getEstimator()
        if not isinstance(estimator, _TorchEstimator):
            given = "none" if estimator is None else f"a {type(estimator).__name__}"
            raise ValueError(
                f"OptunaSearch needs an estimator of ringspark, such as a TorchClassifier, got {given}; put "
                "other stages before the search, into its Pipeline"
            )
        for name in ("runUri", "resume"):
            if estimator.isSet(name):
                raise ValueError(f"the estimator of a search must not set {name}; give the search a runUri")
        return estimator

    def _held_space(self) -> Any:
        if not self.isDefined(self.space):
            raise ValueError(
                "OptunaSearch needs a space, such as {'learningRate': Uniform(1e-4, 1e-1, log=True)}"
            )
        return self.getOrDefault(self.space)

    def _checked_run(self, dataset: DataFrame) -> str | None:
        given = self.getRunUri()
        if given is None:
            return None
        run_uri = storage.normalize(resolve(dataset.sparkSession, given))
        if not storage.is_local(run_uri):
            raise ValueError(
                f"runUri of a search must lie on a disk, mounted where need be, since optuna appends to its "
                f"journal there, got {run_uri!r}; the estimator itself may train in any store"
            )
        storage.check_writable(run_uri)
        names = storage.list_names(run_uri)
        known = (JOURNAL, OWNER, "rows.json", "shards-")
        if names and not any(name.startswith(known) for name in names):
            raise ValueError(
                f"runUri must be a new or empty folder or one with a search, and {run_uri!r} holds "
                f"{names[0]!r}; give another folder"
            )
        storage.make_dirs(run_uri)
        return run_uri

    @contextmanager
    def _split(self, dataset: DataFrame, fit: CheckedFit) -> Iterator[tuple[DataFrame, DataFrame | None]]:
        """Yields the rows to train on, and those that the evaluator judges by."""
        if self.getEvaluator() is None:
            yield dataset, None
            return
        indicator = fit.data.validation_col
        if indicator is not None:
            yield dataset, dataset.where(F.col(indicator))
            return
        drawn = dataset.select("*", F.rand(self.getSeed()).alias(_DRAW))
        parts = [
            drawn.where(condition).drop(_DRAW).persist()
            for condition in (F.col(_DRAW) < self.getTrainRatio(), F.col(_DRAW) >= self.getTrainRatio())
        ]
        try:
            yield parts[0], parts[1]
        finally:
            for part in parts:
                part.unpersist()


def _name(given: Any) -> str:
    return given if isinstance(given, str) else type(given).__name__
