"""The objective of a search, decisions about running trials, the table of trials, and the journal."""

from pathlib import Path
from threading import Lock
from typing import Any

import pytest
from programs import run_program
from pyspark.ml.evaluation import Evaluator, MulticlassClassificationEvaluator
from small_training import epoch_record

from ringspark.estimators.training.history import EpochRecord
from ringspark.extras.search.objective import Objective
from ringspark.extras.search.study import open_study
from ringspark.extras.search.trial_loop import RunningTrial
from ringspark.extras.search.trial_table import rows_of

optuna = pytest.importorskip("optuna")


class Score(Evaluator):
    """Is larger-is-better or smaller-is-better; never called."""

    def __init__(self, is_larger_better: bool) -> None:
        super().__init__()
        self._is_larger_better = is_larger_better

    def _evaluate(self, dataset: Any) -> float:
        raise NotImplementedError

    def isLargerBetter(self) -> bool:  # noqa: N802
        return self._is_larger_better


def _objective(is_larger_better: bool = False, evaluator: Any = None) -> Objective:
    given = {"monitor": "train_loss", "evaluator": evaluator, "held_out": None}
    return Objective(monitor_is_larger_better=is_larger_better, **given)


def _record(loss: float, epoch: int = 1) -> EpochRecord:
    return epoch_record(epoch, train_loss=loss, validation_loss=loss)


@pytest.mark.parametrize("is_monitor_larger_better", [True, False])
@pytest.mark.parametrize("is_score_larger_better", [True, False, None])
def test_the_worse_trial_is_pruned(is_monitor_larger_better: bool, is_score_larger_better: Any) -> None:
    """The direction of the evaluator is also the direction of the study."""
    score = None if is_score_larger_better is None else Score(is_score_larger_better)
    objective = _objective(is_larger_better=is_monitor_larger_better, evaluator=score)
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
        trial.report(objective.of_epoch(_record(value)), 1)
        pruned[name] = trial.should_prune()
        study.tell(trial, 0.0)
    assert pruned == {"first": False, "better": False, "worse": True}


@pytest.mark.spark
def test_settings_of_the_evaluator_make_another_objective(spark: Any) -> None:
    """A resumed search must not rank values of different metrics."""

    def text(**settings: Any) -> str:
        evaluator = MulticlassClassificationEvaluator(metricName="fMeasureByLabel", **settings)
        return _objective(evaluator=evaluator).text

    assert text() == text()
    assert len({text(), text(metricLabel=1.0), text(beta=2.0), text(labelCol="other")}) == 4


def test_a_decision_outlives_the_driver_that_made_it() -> None:
    pruner = optuna.pruners.SuccessiveHalvingPruner(min_resource=1, reduction_factor=2)
    study = optuna.create_study(pruner=pruner)
    for loss in (0.1, 0.2):
        good = study.ask()
        good.report(loss, 1)
        good.should_prune()
        study.tell(good, loss)
    given = study.ask(), _objective(), Lock(), lambda: None
    first = RunningTrial(*given)
    first.epoch(_record(0.9))
    assert first.is_pruned
    # The driver is killed before it informs the study; the training has one more epoch by then.
    resumed = RunningTrial(*given)
    for record in (_record(0.9), _record(0.05, epoch=2)):
        resumed.epoch(record)
    assert resumed.is_pruned
    assert resumed.num_epochs == 1


@pytest.mark.parametrize("is_larger_better", [False, True])
def test_a_pruned_trial_shows_its_monitor_whichever_way_the_evaluator_looks(is_larger_better: bool) -> None:
    objective = _objective(is_larger_better=is_larger_better, evaluator=Score(True))
    study = optuna.create_study(direction="maximize")
    pruned, whole = study.ask(), study.ask()
    pruned.report(objective.of_epoch(_record(0.7)), 1)
    study.tell(pruned, state=optuna.trial.TrialState.PRUNED)
    study.tell(whole, 0.9)
    assert [row["value"] for row in rows_of(study, objective)] == [0.7, 0.9]


WITHOUT_LINKS = """
import errno, os, sys
from optuna.pruners import NopPruner
from ringspark.extras.search.study import open_study

def refuse_links(event, args):
    # As BlobFuse, SMB and the mount of DBFS do.
    if event in ("os.symlink", "os.link"):
        raise OSError(errno.EPERM, "this file system has no links")

sys.addaudithook(refuse_links)
study = open_study(sys.argv[1], False, NopPruner(), {"seed": "0"})
study.optimize(lambda trial: 0.5, n_trials=1)
print(len(study.trials))
"""


def test_a_file_system_without_links_holds_a_journal(tmp_path: Path) -> None:
    assert run_program(WITHOUT_LINKS, tmp_path).stdout == "1\n"
    assert [file.name for file in tmp_path.iterdir()] == ["journal.log"], "the lock is released"


LOCKED = """
import sys
from optuna.pruners import NopPruner
from optuna.storages.journal import JournalFileOpenLock
from ringspark.extras.search.study import open_study

file = f"{sys.argv[1]}/journal.log"
held, attempts = JournalFileOpenLock(file), []
held.acquire()

def release_at_third_attempt(event, args):
    if event == "open" and args[0] == f"{file}.lock":
        attempts.append(args)
        if len(attempts) == 3:
            held.release()  # fails if somebody has removed the lock

sys.addaudithook(release_at_third_attempt)
open_study(sys.argv[1], False, NopPruner(), {"seed": "0"})
assert len(attempts) > 2, "it did not wait"
"""


def test_the_lock_of_a_living_driver_is_waited_for(tmp_path: Path) -> None:
    assert run_program(LOCKED, tmp_path).stdout == ""


@pytest.mark.parametrize("lines", ['{"op_code": 0\n{}\n', "{}\n", "3\n"])
def test_a_damaged_journal_is_refused_in_one_sentence(tmp_path: Path, lines: str) -> None:
    (tmp_path / "journal.log").write_text(lines)
    with pytest.raises(ValueError, match=r"cannot resume .* journal.log is damaged \(.*\); set another"):
        open_study(str(tmp_path), False, optuna.pruners.NopPruner(), {"seed": "0"})
