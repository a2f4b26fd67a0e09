"""Trackers that fail or hang, and the output of a training without a terminal."""

import io
import json
import logging
import threading
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest
from small_networks import linear
from small_training import epoch_record
from spark_tables import quiet

from ringspark.estimators import TorchRegressor, run_layout
from ringspark.estimators.tracking import watcher
from ringspark.estimators.tracking.base import Listener, RunEnd, RunStart, Tracker
from ringspark.estimators.tracking.console import ConsoleTracker
from ringspark.estimators.tracking.registry import make_trackers
from ringspark.estimators.tracking.watcher import RunWatcher
from ringspark.estimators.training.history import EpochRecord, TrainingProgress

EPOCH = epoch_record()
AT = ("start", "epoch", "end")


class Faulty(Tracker, Listener):
    """Raises or hangs in one of its calls."""

    name = "faulty"

    def __init__(self, at: str, released: threading.Event | None) -> None:
        self.at, self._released = at, released
        self.reached = threading.Event()

    def start(self, run: RunStart) -> Listener:
        self._call("start")
        return self

    def epoch(self, record: EpochRecord) -> None:
        self._call("epoch")

    def end(self, end: RunEnd) -> None:
        self._call("end")

    def _call(self, what: str) -> None:
        if what != self.at:
            return
        self.reached.set()
        if self._released is None:
            raise OSError("no room")
        self._released.wait()


@pytest.fixture
def released():
    """Ends hanging tracker calls when the test is over."""
    event = threading.Event()
    yield event
    event.set()
    for thread in threading.enumerate():
        if thread.name.startswith("ringspark-tracker"):
            thread.join(10)


def told(run_uri: Path, tracker: Tracker) -> list[str]:
    """Watches a run of one epoch by `tracker` and a sound tracker; returns the events of the second."""
    (run_uri / run_layout.HISTORY).write_text(json.dumps([asdict(EPOCH)]))
    events: list[str] = []
    (sound,) = make_trackers([lambda event: events.append(event["event"])], shows_progress=False)
    with RunWatcher(RunStart(name="stage", run_uri=str(run_uri)), [tracker, sound]):
        pass
    return events


@pytest.mark.parametrize("at", AT)
def test_a_tracker_that_raises_is_a_warning_and_harms_no_other(at, tmp_path, caplog):
    with caplog.at_level(logging.WARNING, "ringspark"):
        assert told(tmp_path, Faulty(at, None)) == ["start", "epoch", "end"]
    (record,) = caplog.records
    assert "the tracker faulty failed (OSError: no room)" in record.getMessage()


class Flaky(Tracker, Listener):
    """Fails at two of every three epochs."""

    name = "flaky"

    def __init__(self) -> None:
        self.seen: list[int] = []

    def start(self, run: RunStart) -> Listener:
        return self

    def epoch(self, record: EpochRecord) -> None:
        if record.epoch % 3:
            raise OSError("no room")
        self.seen.append(record.epoch)


def test_a_tracker_that_fails_now_and_then_receives_every_later_epoch(tmp_path):
    history = [asdict(replace(EPOCH, epoch=epoch)) for epoch in range(1, 10)]
    (tmp_path / run_layout.HISTORY).write_text(json.dumps(history))
    tracker = Flaky()
    with RunWatcher(RunStart(name="stage", run_uri=str(tmp_path)), [tracker]):
        pass
    assert tracker.seen == [3, 6, 9]


@pytest.mark.parametrize("at", AT)
def test_a_tracker_that_hangs_for_ever_is_left_alone_at_the_end(at, tmp_path, caplog, monkeypatch, released):
    monkeypatch.setattr(watcher, "END_SECONDS", 1.0)
    hanging = Faulty(at, released)
    with caplog.at_level(logging.WARNING, "ringspark"):
        assert told(tmp_path, hanging) == ["start", "epoch", "end"]
    # The tracker still hangs, but the training has returned.
    assert hanging.reached.is_set()
    assert not released.is_set()
    (record,) = caplog.records
    assert "the tracker faulty has not answered" in record.getMessage()


def test_a_tracker_that_has_hung_for_long_is_not_waited_for(tmp_path, monkeypatch, released):
    hanging = Faulty("start", released)
    channel = watcher._Channel(hanging, RunStart(name="stage", run_uri=str(tmp_path)))
    monkeypatch.setattr(watcher, "END_SECONDS", 100.0)
    before = watcher.time.monotonic()
    assert channel.gives_up_at >= before + 100.0
    channel.thread.start()
    assert hanging.reached.wait(60)
    first = channel.gives_up_at
    # The timeout counts from the start of the call, whenever the caller reads it.
    assert channel.gives_up_at == first <= watcher.time.monotonic() + 100.0
    channel.put(None)


@pytest.mark.spark
def test_a_fit_with_failing_trackers_returns_its_model(spark, tmp_path, caplog):
    def fit(*tracking: Any) -> Any:
        settings = {"model": linear(1, 1), "epochs": 2, "batchSize": 32, "tracking": list(tracking)}
        table = spark.range(96).selectExpr("array(sin(id)) as features", "cos(id) as label")
        return quiet(TorchRegressor, tmp_path, **settings).fit(table)

    def losses(model: Any) -> list[float]:
        return [record.train_loss for record in model.summary.epochs]

    plain = losses(fit())
    with caplog.at_level(logging.WARNING, "ringspark"):
        tracked = losses(fit(Faulty("start", None), lambda event: 1 / 0))
    assert tracked == plain
    for name in ("faulty", "FunctionTracker"):
        assert f"tracker {name} failed" in caplog.text


class Terminal(io.StringIO):
    encoding = "utf-8"

    def isatty(self) -> bool:
        return True


def test_the_console_shows_a_bar_on_a_terminal(monkeypatch):
    """`test_plain_lines.py` has the lines elsewhere."""
    stream = Terminal()
    monkeypatch.setattr("sys.stderr", stream)
    # Short enough to print every position.
    shown = ConsoleTracker(period_seconds=1e-9).start(RunStart(name="stage", run_uri="run"))
    position = TrainingProgress(epoch=1, epochs=2, step=10, num_steps=200, rows=0, seconds=0.0)
    shown.progress(position)
    shown.progress(replace(position, epoch=2, step=110))
    shown.epoch(EPOCH)
    shown.end(RunEnd(status="finished"))
    assert "\r" in stream.getvalue()
    assert "110/200" in stream.getvalue()
    assert "training: epoch" not in stream.getvalue()


@pytest.mark.parametrize("period", [0, -1, "30", True])
def test_a_period_that_is_no_time_is_refused(period):
    with pytest.raises(ValueError, match=r"period_seconds of 'console' must be (above 0|a number)"):
        make_trackers([{"name": "console", "period_seconds": period}], shows_progress=False)
