"""`OptunaSearch`: an estimator that searches the settings of another estimator."""

from __future__ import annotations

from contextlib import closing
from typing import Any

from pyspark.sql import DataFrame

from ringspark.estimators.checked_fit import CheckedFit, check_settings
from ringspark.estimators.launch.python_daemon import choose_daemon
from ringspark.estimators.prepared_fit import prepare_fit
from ringspark.extras.search.objective import Objective
from ringspark.extras.search.search_model import SearchModel
from ringspark.extras.search.search_params import OptunaParams
from ringspark.extras.search.search_stage import SearchStage
from ringspark.extras.search.space import Space
from ringspark.extras.search.study import JOURNAL, check_choices, open_study, pruner_of, sampler_of
from ringspark.extras.search.trial_data import TrialData
from ringspark.extras.search.trial_loop import TrialLoop
from ringspark.extras.search.trial_table import rows_of
from ringspark.pipelines import storage
from ringspark.pipelines.columns import check_frame


class OptunaSearch(OptunaParams, SearchStage):
    """Fits copies of an estimator with settings that optuna chooses; returns the model of the best copy::

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

    The constructor's keywords are the Params below.
    """

    def _fit(self, dataset: DataFrame) -> SearchModel:
        check_frame(dataset, "OptunaSearch.fit")
        estimator = self._checked_estimator()
        check_choices(self.getSampler(), self.getPruner())
        held = self._held_space()
        Space(held, check_settings(estimator, dataset))
        run_uri = self._checked_run(dataset, JOURNAL)
        prepared = prepare_fit(estimator, dataset, search_uri=run_uri)
        dataset = prepared.dataset
        space = Space(held, prepared)
        fit = CheckedFit.of(prepared.estimator, dataset)
        choose_daemon(dataset.sparkSession, fit.config.use_gpu)
        with (
            self._split(dataset, fit) as split,
            closing(TrialData(split.training, run_uri, split.num_rows)) as data,
        ):
            manifest = data.manifest(fit.data)
            if run_uri is not None:
                prepared.keep_plan(run_uri)
            objective = Objective.of(fit, manifest, self.getMonitor(), self.getEvaluator(), split.held_out)
            epochs = None if space.varies("epochs") else fit.config.epochs
            study = open_study(
                run_uri,
                objective.is_larger_better,
                pruner_of(self.getPruner(), epochs),
                {
                    **space.fixed_settings(fit, manifest),
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
                dataset=split.training,
                run_uri=run_uri,
            )
            loop.run(self.getNumTrials(), self.getParallelism())
            model, values = loop.best()
        model._describe_columns(prepared.uses)
        found = SearchModel()._set_found(model, values, rows_of(study, objective))
        found._resetUid(self.uid)
        return found

    def _check_store(self, run_uri: str) -> None:
        if not storage.is_local(run_uri):
            raise ValueError(
                f"runUri of a search must be on a disk or mount, because optuna appends to its journal "
                f"there, got {run_uri!r}; the estimator itself may train in any store"
            )


def _name(given: Any) -> str:
    return given if isinstance(given, str) else type(given).__name__
