"""`OptunaSearch`: an estimator that searches the settings of another estimator."""

from __future__ import annotations

from typing import Any

from ringspark.extras.search.search_params import OptunaParams
from ringspark.extras.search.search_stage import SearchStage
from ringspark.extras.search.space import Space
from ringspark.extras.search.study import JOURNAL, check_choices, open_study, pruner_of, sampler_of
from ringspark.extras.search.trainings import Trainings
from ringspark.extras.search.trial_loop import TrialLoop
from ringspark.pipelines import storage


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

    MARKS = (JOURNAL,)

    def _check_space(self, space: Space, estimator: Any) -> None:
        check_choices(self.getSampler(), self.getPruner())

    def _make_loop(self, trainings: Trainings, epochs: int, about: dict[str, str]) -> TrialLoop:
        sampler, seed, pruner = self.getSampler(), self.getSeed(), self.getPruner()
        study = open_study(
            trainings.run_uri,
            trainings.objective.is_larger_better,
            pruner_of(pruner, None if trainings.space.varies("epochs") else epochs),
            about | {"sampler": _name(sampler), "pruner": _name(pruner)},
        )
        return TrialLoop(
            trainings, study, lambda number: sampler_of(sampler, seed, number), self.getNumTrials()
        )

    def _check_store(self, run_uri: str) -> None:
        if not storage.is_local(run_uri):
            raise ValueError(
                f"runUri of a search must be on a disk or mount, because optuna appends to its journal "
                f"there, got {run_uri!r}; the estimator itself may train in any store"
            )


def _name(given: Any) -> str:
    return given if isinstance(given, str) else type(given).__name__
