"""The objective of a search: the values that a pruner sees, and its text."""

from __future__ import annotations

from typing import Any

import pytest
from pyspark.ml.evaluation import Evaluator, MulticlassClassificationEvaluator

from ringspark.estimators.training.history import EpochRecord
from ringspark.extras.search.objective import Objective

optuna = pytest.importorskip("optuna")


class Score(Evaluator):
    """An evaluator that can be larger-is-better or smaller-is-better."""

    def __init__(self, is_larger_better: bool) -> None:
        super().__init__()
        self._is_larger_better = is_larger_better

    def _evaluate(self, dataset: Any) -> float:
        raise NotImplementedError

    def isLargerBetter(self) -> bool:  # noqa: N802
        return self._is_larger_better


@pytest.mark.parametrize("is_monitor_larger_better", [True, False])
@pytest.mark.parametrize("is_score_larger_better", [True, False, None])
def test_the_trial_with_the_worse_monitor_is_pruned(
    is_monitor_larger_better: bool, is_score_larger_better: bool | None
) -> None:
    """The direction of the evaluator is also the direction of the study."""
    objective = Objective(
        monitor="train_loss",
        monitor_is_larger_better=is_monitor_larger_better,
        evaluator=None if is_score_larger_better is None else Score(is_score_larger_better),
        held_out=None,
    )
    study = optuna.create_study(
        direction="maximize" if objective.is_larger_better else "minimize",
        pruner=optuna.pruners.MedianPruner(n_startup_trials=1),
    )
    loss = {"first": 2.0, "better": 3.0, "worse": 1.0}
    if not is_monitor_larger_better:
        loss |= {"better": 1.0, "worse": 3.0}
    pruned: dict[str, Any] = {}
    for name, value in loss.items():
        trial = study.ask()
        trial.report(objective.of_epoch(_epoch(value)), 1)
        pruned[name] = trial.should_prune()
        study.tell(trial, 0.0)
    assert pruned == {"first": False, "better": False, "worse": True}


@pytest.mark.spark
def test_settings_of_the_evaluator_make_another_objective(spark: Any) -> None:
    """A resumed search must not rank values of different metrics."""

    def text(**settings: Any) -> str:
        evaluator = MulticlassClassificationEvaluator(metricName="fMeasureByLabel", **settings)
        return Objective(
            monitor="train_loss", monitor_is_larger_better=False, evaluator=evaluator, held_out=None
        ).text

    assert text() == text()
    assert len({text(), text(metricLabel=1.0), text(beta=2.0), text(labelCol="other")}) == 4


def _epoch(loss: float) -> EpochRecord:
    return EpochRecord(
        epoch=1, steps=1, rows=1, seconds=1.0, learning_rate=0.1, train_loss=loss, validation_loss=None
    )
