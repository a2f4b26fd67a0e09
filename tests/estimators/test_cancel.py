"""Training cancelled through Spark, as from a notebook or by an administrator."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import pytest
from processes import has_ended
from waiting import wait_for

from ringspark.estimators import Callback, TorchRegressor, TrainingCancelledError, TrainingState
from ringspark.estimators.failures import Failure
from ringspark.estimators.launch.heartbeat import read_beats
from ringspark.estimators.launch.owner import read_owner
from ringspark.estimators.launch.supervisor import Supervisor
from ringspark.estimators.run.folder import RunFolder
from ringspark.estimators.training.settings.config import TrainConfig
from ringspark.models import ModelSpec

MASTER = os.environ.get("RINGSPARK_TEST_MASTER", "local[4]")
IS_CONNECT = MASTER == "connect" or MASTER.startswith("sc://")
NUM_WORKERS = 2

pytestmark = [pytest.mark.spark, pytest.mark.modes]


class Slow(Callback):
    """Trains slowly while `path` exists."""

    def __init__(self, path: str) -> None:
        self._path = path

    def on_step_end(self, state: TrainingState) -> None:
        if os.path.exists(self._path):
            time.sleep(0.5)


def _cancel_group(spark: Any) -> None:
    spark.sparkContext.cancelJobGroup("my group")


def _cancel_all(spark: Any) -> None:
    spark.sparkContext.cancelAllJobs()


def _interrupt_all(spark: Any) -> None:
    spark.interruptAll()


WAYS = [_interrupt_all] if IS_CONNECT else [_cancel_group, pytest.param(_cancel_all, marks=pytest.mark.slow)]


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


@pytest.mark.parametrize("cancel", WAYS, ids=lambda way: way.__name__.strip("_"))
def test_a_cancelled_training_keeps_its_checkpoint_and_leaves_no_worker(spark, tmp_path, cancel):
    slow, run = tmp_path / "slow", tmp_path / "run"
    slow.touch()
    estimator = TorchRegressor(
        model=ModelSpec("linear", {"in_features": 2, "out_features": 1}),
        callbacks=[Slow(str(slow))],
        epochs=10,
        batchSize=16,
        numWorkers=NUM_WORKERS,
        runUri=str(run),
        checkpointEverySteps=5,
        showProgress=False,
    )
    table = spark.range(0, 96, 1, 2).selectExpr("array(sin(id), cos(id)) as features", "sin(2 * id) as label")
    folder = RunFolder(str(run), is_given=True)
    pids: list[int] = []

    def act() -> None:
        try:
            wait_for("a checkpoint", folder.has_checkpoint)
            owner = read_owner(str(run))
            assert owner is not None
            beats = read_beats(str(run), NUM_WORKERS, owner.token, owner.launch)
            pids.extend(beat.pid for beat in beats)
        finally:
            cancel(spark)

    thread = threading.Thread(target=act)
    with _job_group(spark):
        thread.start()
        try:
            with pytest.raises(
                TrainingCancelledError, match=r"was cancelled in Spark .*fit again with resume=True"
            ):
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


@pytest.mark.parametrize("cancel", WAYS, ids=lambda way: way.__name__.strip("_"))
def test_a_cancel_ends_the_wait_for_executors(spark, cancel):
    """No Spark job of the training is running then, so the cancel has no job to end."""
    config = TrainConfig(
        shards_uri="",
        run_uri="",
        input_columns=("x",),
        label_columns=("y",),
        num_workers=2,
        timeout_seconds=30.0,
    )
    supervisor = Supervisor(spark=spark, config=config, make_work=Any, token="t")  # type: ignore[arg-type]
    supervisor._stage = SimpleNamespace(slots=lambda: 1)
    is_over = threading.Event()

    def act() -> None:
        while not is_over.wait(0.2):
            cancel(spark)

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
