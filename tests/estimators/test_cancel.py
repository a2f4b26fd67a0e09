"""Training cancelled through Spark, as from a notebook or by an administrator."""

import os
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from acting_callback import Acts
from processes import has_ended
from small_networks import linear
from spark_tables import quiet, waves
from supervised_gang import supervisor_of
from waiting import wait_for

from ringspark.estimators import TorchRegressor, TrainingCancelledError
from ringspark.estimators.failures import Failure
from ringspark.estimators.launch.heartbeat import read_beats
from ringspark.estimators.launch.owner import read_owner
from ringspark.estimators.run.folder import RunFolder

MASTER = os.environ.get("RINGSPARK_TEST_MASTER", "local[4]")
IS_CONNECT = MASTER == "connect" or MASTER.startswith("sc://")
NUM_WORKERS = 2

pytestmark = [pytest.mark.spark, pytest.mark.modes]

WAYS = {
    "cancel_group": lambda spark: spark.sparkContext.cancelJobGroup("my group"),
    "cancel_all": lambda spark: spark.sparkContext.cancelAllJobs(),
    "interrupt_all": lambda spark: spark.interruptAll(),
}
NAMES = (
    ["interrupt_all"] if IS_CONNECT else ["cancel_group", pytest.param("cancel_all", marks=pytest.mark.slow)]
)


def slow_while(path: Path) -> Acts:
    """Returns a callback that makes steps slow while `path` exists."""
    return Acts(step_end=lambda state: time.sleep(0.2 * path.exists()))


@contextmanager
def _job_group(spark: Any) -> Iterator[None]:
    """Sets the job group that a notebook uses to cancel a cell. Connect has no job groups."""
    if IS_CONNECT:
        yield
        return
    spark.sparkContext.setJobGroup("my group", "what a notebook sets for a cell", interruptOnCancel=False)
    try:
        yield
    finally:
        spark.sparkContext.setLocalProperty("spark.jobGroup.id", None)
        spark.sparkContext.setLocalProperty("spark.job.description", None)


@pytest.mark.parametrize("way", NAMES)
def test_a_cancelled_training_keeps_its_checkpoint_and_leaves_no_worker(spark, tmp_path, way):
    slow, run = tmp_path / "slow", tmp_path / "run"
    slow.touch()
    run_settings = {"numWorkers": NUM_WORKERS, "runUri": str(run), "checkpointEverySteps": 5}
    settings = {"model": linear(), "callbacks": [slow_while(slow)], "epochs": 10, "batchSize": 16}
    estimator = quiet(TorchRegressor, tmp_path, **settings, **run_settings)
    table = waves(spark)
    folder = RunFolder(str(run), is_given=True)
    pids: list[int] = []

    def act() -> None:
        try:
            wait_for("a checkpoint", folder.has_checkpoint)
            owner = read_owner(str(run))
            beats = read_beats(str(run), NUM_WORKERS, owner.token, owner.launch)
            pids.extend(beat.pid for beat in beats)
        finally:
            WAYS[way](spark)

    thread = threading.Thread(target=act)
    with _job_group(spark):
        thread.start()
        try:
            refusal = r"was cancelled in Spark .*fit again with resume=True"
            with pytest.raises(TrainingCancelledError, match=refusal):
                estimator.fit(table)
        finally:
            thread.join()
    assert len(pids) == NUM_WORKERS
    wait_for("the workers' end", lambda: all(map(has_ended, pids)))
    assert folder.has_checkpoint()
    slow.unlink()
    model = estimator.copy({estimator.resume: True}).fit(table)
    assert model.summary.steps == 60
    assert model.summary.resumed_steps


@pytest.mark.parametrize("way", NAMES)
def test_a_cancel_ends_the_wait_for_executors(spark, way):
    """No Spark job of the training is running then, so the cancel has no job to end."""
    supervisor = supervisor_of(spark, num_workers=2, timeout_seconds=30.0)
    supervisor._stage = SimpleNamespace(slots=lambda: 1)
    is_over = threading.Event()

    def act() -> None:
        while not is_over.wait(0.2):
            WAYS[way](spark)

    thread = threading.Thread(target=act)
    with _job_group(spark):
        thread.start()
        try:
            with pytest.raises(TrainingCancelledError, match="cancelled while it waited for executors"):
                supervisor._make_room(Failure.lost(0, "host", "step 3", "its process died"))
        finally:
            is_over.set()
            thread.join()
    assert spark.range(8).count() == 8, "all slots are free again"
