"""Progress files of rank 0; `test_worker.py` checks their content."""

import threading
from pathlib import Path

import pytest

from ringspark.estimators.training import history
from ringspark.estimators.training.history import (
    EpochRecord,
    RunLog,
    TrainingProgress,
    read_history,
    read_progress,
)
from ringspark.pipelines import storage


def _at(step: int) -> TrainingProgress:
    return TrainingProgress(epoch=1, epochs=1, step=step, num_steps=9, rows=step, seconds=0.0)


def test_the_position_is_there_when_the_training_has_ended(tmp_path: Path) -> None:
    with RunLog(str(tmp_path), writes=True) as log:
        log.write_progress(_at(1))
    assert read_progress(str(tmp_path)) == _at(1)


def test_a_store_that_does_not_answer_holds_no_training_up(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    written: list[bytes] = []
    answers = threading.Event()

    def write(uri: str, data: bytes, durable: bool = True) -> None:
        answers.wait(60)
        written.append(data)

    monkeypatch.setattr(storage, "write_atomic", write)
    monkeypatch.setattr(history, "PROGRESS_SECONDS", 0.0)
    with RunLog(str(tmp_path), writes=True) as log:
        for step in range(1, 4):
            log.write_progress(_at(step))
        assert not written
        answers.set()
    # The log skipped the other records.
    assert len(written) == 1


def test_a_store_that_fails_ends_no_training(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def write(uri: str, data: bytes, durable: bool = True) -> None:
        raise OSError("no such bucket")

    monkeypatch.setattr(storage, "write_atomic", write)
    epoch = EpochRecord(
        epoch=1, steps=9, rows=9, seconds=1.0, learning_rate=0.1, train_loss=1.0, validation_loss=None
    )
    with RunLog(str(tmp_path), writes=True) as log:
        log.write_progress(_at(1))
        log.add_epoch(epoch)
    assert log.history == [epoch]
    assert read_progress(str(tmp_path)) is None
    assert read_history(str(tmp_path)) == []


def test_other_ranks_write_nothing(tmp_path: Path) -> None:
    with RunLog(str(tmp_path), writes=False) as log:
        log.write_progress(_at(1))
    assert not list(tmp_path.iterdir())
