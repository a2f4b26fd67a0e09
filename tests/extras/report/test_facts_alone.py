"""What a report shows of a run without its settings, and what it costs to read a run's facts."""

import subprocess
import sys

from ringspark.estimators.training.history import EpochRecord
from ringspark.estimators.training.run_environment import Environment, GangStart, RankHost
from ringspark.extras.report.facts import RunFacts
from ringspark.extras.report.sections import environment, headline


def test_facts_of_a_run_need_no_torchmetrics() -> None:
    program = "import sys, ringspark.extras.report.facts; sys.exit('torchmetrics' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", program], check=False).returncode == 0


def test_a_known_metric_has_its_best_epoch_without_the_settings() -> None:
    history = tuple(
        EpochRecord(
            epoch=epoch,
            steps=1,
            rows=9,
            seconds=1.0,
            learning_rate=0.1,
            train_loss=1.0,
            validation_loss=1.0,
            metrics={"validation_accuracy": 1 / epoch},
        )
        for epoch in (1, 2)
    )
    rows = headline._results(RunFacts(run_uri="/gone", history=history)).rows
    assert [row[3] for row in rows if row[0] == "validation_accuracy"] == ["1"]


def test_the_newest_start_is_shown() -> None:
    rank = RankHost(host="h", device="cpu", cores=1, host_memory=1)
    starts = tuple(
        GangStart(began=3600.0 * hour, system="s", versions={}, ranks=(rank,)) for hour in range(60)
    )
    *_, table = environment.make(RunFacts(run_uri="/r", environment=Environment(starts=starts)))
    assert environment._time(starts[-1]) in [row[0] for row in table.rows[: table.most]]
