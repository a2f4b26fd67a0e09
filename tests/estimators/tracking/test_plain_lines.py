"""Progress lines of a training without a terminal, with a fake clock."""

from dataclasses import replace

import pytest

from ringspark.estimators.tracking.base import RunStart
from ringspark.estimators.tracking.console import ConsoleTracker, PlainLines, duration
from ringspark.estimators.training.history import EpochRecord, TrainingProgress

START = TrainingProgress(epoch=1, epochs=5, step=0, num_steps=3_000, rows=0, seconds=0.0)
EPOCH = EpochRecord(
    epoch=2,
    steps=600,
    rows=600_000,
    seconds=61.24,
    learning_rate=0.1,
    train_loss=0.51236,
    validation_loss=None,
)


class Log:
    """Collects the log lines, with a fake clock."""

    def __init__(self) -> None:
        self.lines: list[str] = []
        self.now = 100.0
        self.shown = PlainLines(self.lines.append, lambda: self.now, 30.0)

    def at(self, seconds: float, progress: TrainingProgress) -> None:
        self.now = 100.0 + seconds
        self.shown.progress(progress)


def test_there_is_one_line_a_period_however_often_the_position_is_read():
    log = Log()
    for half in range(1, 183):
        seconds = half / 2
        step = int(10 * seconds)
        log.at(seconds, replace(START, epoch=1 + step // 600, step=step, rows=1_000 * step, seconds=seconds))
    assert log.lines == [
        "training: epoch 1/5, step 300/3,000, 10,000 rows/s, 5 min left",
        "training: epoch 2/5, step 600/3,000, 10,000 rows/s, 4 min left",
        "training: epoch 2/5, step 900/3,000, 10,000 rows/s, 4 min left",
    ]


def test_a_training_without_a_step_in_the_period_says_so_without_a_guess():
    log = Log()
    log.at(1, START)
    log.at(31, START)
    assert log.lines == ["training: epoch 1/5, step 0/3,000"]


def test_the_time_left_counts_from_where_the_workers_started_again():
    log = Log()
    log.at(0, replace(START, step=2_000))
    log.at(10, replace(START, step=2_900))
    # The workers failed and resumed from a checkpoint; from here on they take 1 step per second.
    log.at(20, replace(START, step=1_000))
    log.at(40, replace(START, step=1_020))
    assert log.lines == ["training: epoch 1/5, step 1,020/3,000, 33 min left"]


def test_an_epoch_has_its_line_at_once():
    log = Log()
    log.shown.epoch(EPOCH)
    log.shown.epoch(replace(EPOCH, epoch=3, validation_loss=0.6))
    assert log.lines == [
        "epoch 2: loss 0.5124, 61.2 s",
        "epoch 3: loss 0.5124, validation loss 0.6000, 61.2 s",
    ]


@pytest.mark.parametrize(
    ("seconds", "words"),
    [
        (0, "0 s"),
        (59.4, "59 s"),
        (59.6, "1 min"),
        (3599, "1 h"),
        (11_100, "3 h 5 min"),
        (187_200, "2 d 4 h"),
        (172_800, "2 d"),
    ],
)
def test_durations_have_two_units_at_most(seconds, words):
    assert duration(seconds) == words


def test_lines_go_to_standard_error_in_the_period_of_the_setting(capsys):
    shown = ConsoleTracker(period_seconds=1e-9).start(RunStart(name="stage", run_uri="run"))
    shown.progress(replace(START, step=10))
    shown.epoch(EPOCH)
    assert capsys.readouterr() == ("", "training: epoch 1/5, step 10/3,000\nepoch 2: loss 0.5124, 61.2 s\n")
