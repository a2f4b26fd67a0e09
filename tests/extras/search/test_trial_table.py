"""The table of a search's trials."""

from __future__ import annotations

from typing import Any

import pytest
from pyspark.ml.evaluation import Evaluator

from ringspark.estimators.training.history import EpochRecord
from ringspark.extras.search.objective import Objective
from ringspark.extras.search.trial_table import rows_of

optuna = pytest.importorskip("optuna")


class Accuracy(Evaluator):
    """A larger-is-better evaluator that is never called."""

    def _evaluate(self, dataset: Any) -> float:
        raise NotImplementedError


@pytest.mark.parametrize("monitor_is_larger_better", [False, True])
def test_a_pruned_trial_shows_its_monitor_whichever_way_the_evaluator_looks(
    monitor_is_larger_better: bool,
) -> None:
    objective = Objective(
        monitor="train_loss",
        monitor_is_larger_better=monitor_is_larger_better,
        evaluator=Accuracy(),
        held_out=None,
    )
    study = optuna.create_study(direction="maximize")
    pruned, whole = study.ask(), study.ask()
    epoch = EpochRecord(
        epoch=1, steps=3, rows=96, seconds=0.5, learning_rate=0.1, train_loss=0.7, validation_loss=None
    )
    pruned.report(objective.of_epoch(epoch), 1)
    study.tell(pruned, state=optuna.trial.TrialState.PRUNED)
    study.tell(whole, 0.9)
    assert [row["value"] for row in rows_of(study, objective)] == [0.7, 0.9]
