"""What a driver decides about a running trial, and what a resumed search decides again."""

from __future__ import annotations

from pathlib import Path

import pytest

from ringspark.estimators.training.history import EpochRecord
from ringspark.extras.search.objective import Objective
from ringspark.extras.search.trial_loop import RunningTrial

optuna = pytest.importorskip("optuna")

OBJECTIVE = Objective(
    monitor="validation_loss", monitor_is_larger_better=False, evaluator=None, held_out=None
)


def _record(epoch: int, loss: float) -> EpochRecord:
    return EpochRecord(
        epoch=epoch, steps=1, rows=1, seconds=1.0, learning_rate=0.1, train_loss=loss, validation_loss=loss
    )


def test_a_decision_outlives_the_driver_that_made_it(tmp_path: Path) -> None:
    pruner = optuna.pruners.SuccessiveHalvingPruner(min_resource=1, reduction_factor=2)
    study = optuna.create_study(pruner=pruner)
    for loss in (0.1, 0.2):
        good = study.ask()
        good.report(loss, 1)
        good.should_prune()
        study.tell(good, loss)
    trial = study.ask()

    def watched() -> RunningTrial:
        return RunningTrial(trial, str(tmp_path), str(tmp_path / "stop"), 4, OBJECTIVE)

    first = watched()
    first.report([_record(1, 0.9)])
    assert first.is_pruned
    # The driver is killed before it informs the study; the training has one more epoch by then.
    resumed = watched()
    resumed.report([_record(1, 0.9), _record(2, 0.05)])
    assert resumed.is_pruned
    assert resumed.num_epochs == 1
