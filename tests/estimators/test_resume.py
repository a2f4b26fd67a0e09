"""Trainings that are killed, stopped, cancelled and resumed. tests/faults has larger ones."""

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from acting_callback import Acts
from processes import has_ended
from small_networks import linear
from spark_tables import quiet, waves
from waiting import wait_for

from ringspark.estimators import TorchRegressor, TrainingState, WorkerError
from ringspark.estimators.launch.heartbeat import Beat
from ringspark.estimators.run.folder import RunFolder
from ringspark.pipelines import storage, write_shards

MASTER = os.environ.get("RINGSPARK_TEST_MASTER", "local[4]")

pytestmark = [
    pytest.mark.spark,
    pytest.mark.skipif(not MASTER.startswith("local["), reason="hits processes of this host"),
]

STEPS = 24


def walk(path: Path, seconds: float = 0.0) -> Acts:
    """Returns a callback that waits in each step, and raises in step 15 while `path` exists."""

    def start(state: TrainingState) -> None:
        with open(f"{path}.starts", "a") as file:
            file.write("start\n")

    def step(state: TrainingState) -> None:
        time.sleep(seconds)
        if state.step == 15 and path.exists():
            raise ZeroDivisionError("on purpose")

    return Acts(train_start=start, step_end=step)


def damage(path: Path, shard: Path, state: TrainingState) -> None:
    """Inverts a byte of a shard in step 15 and kills rank 1, while `path` exists."""
    if state.step == 15 and state.rank == 1 and path.exists():
        path.unlink()
        _invert(shard)
        os.kill(os.getpid(), signal.SIGKILL)


def remove(run: str, state: TrainingState) -> None:
    """Removes the run folder in step 3, as the driver does at the end of a run."""
    time.sleep(0.1)
    if state.step == 3 and state.rank == 0:
        storage.remove(storage.join(run, "owner.json"))
        storage.remove(run, recursive=True)


def _invert(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[len(data) // 3] ^= 0xFF
    path.write_bytes(data)


@pytest.fixture(scope="module")
def table(spark):
    return waves(spark)


@pytest.fixture(scope="module")
def shards(table, tmp_path_factory):
    return write_shards(table, str(tmp_path_factory.mktemp("data") / "shards")).uri


def _estimator(root: Path, **changes: Any) -> Any:
    params = {
        "model": linear(),
        "callbacks": [walk(root / "fails")],
        "epochs": 4,
        "batchSize": 16,
        "numWorkers": 2,
        "collective": "torch",
        "runUri": str(root / "run"),
        "checkpointEverySteps": 5,
        "timeoutSeconds": 60.0,
    }
    return quiet(TorchRegressor, root, **(params | changes))


def _slow(root: Path, **changes: Any) -> Any:
    """An estimator whose ranks can be hit between two steps."""
    return _estimator(root, callbacks=[walk(root / "fails", 0.1)], **changes)


def _starts(root: Path) -> int:
    return len((root / "fails.starts").read_text().split())


def _beat(run: Path, rank: int) -> Beat | None:
    try:
        return Beat.from_json((run / "heartbeat" / f"rank-{rank}.json").read_bytes())
    except FileNotFoundError:
        return None


@contextmanager
def _hit(root: Path, rank: int, number: signal.Signals) -> Iterator[list[Beat]]:
    """Sends a signal to a rank's process after the first checkpoint."""
    run, hits = root / "run", []

    def hit() -> None:
        wait_for("a checkpoint", RunFolder(str(run), is_given=True).has_checkpoint)
        beat = wait_for("a beat", lambda: _beat(run, rank))
        os.kill(beat.pid, number)
        hits.append(beat)

    thread = threading.Thread(target=hit)
    thread.start()
    try:
        yield hits
    finally:
        thread.join()


def test_a_killed_worker_costs_no_step(table, shards, tmp_path):
    estimator = _slow(tmp_path)
    with _hit(tmp_path, 1, signal.SIGKILL) as hits:
        model = estimator.fitOnShards(shards)
    assert len(hits) == 1
    assert model.summary.restarts == 1
    assert "failed in phase" in model.summary.restart_reasons[0]
    assert len(model.summary.resumed_steps) == 1
    assert model.summary.steps == STEPS
    whole = _estimator(tmp_path, runUri=str(tmp_path / "undisturbed")).fitOnShards(shards)
    assert whole.summary.restarts == 0
    pairs = zip(model.module().parameters(), whole.module().parameters(), strict=True)
    assert all(torch.equal(left, right) for left, right in pairs)


@pytest.mark.slow
def test_a_stopped_worker_is_named_and_ended(shards, tmp_path):
    estimator = _slow(tmp_path, timeoutSeconds=10.0, maxRestarts=0)
    with _hit(tmp_path, 1, signal.SIGSTOP) as hits, pytest.raises(WorkerError) as caught:
        estimator.fitOnShards(shards)
    first_line = str(caught.value).splitlines()[0]
    assert first_line.startswith("rank 1 on host ")
    assert "has sent no heartbeat" in first_line
    assert "fit again with resume=True to resume" in first_line
    (beat,) = hits
    wait_for("the worker's end", lambda: has_ended(beat.pid))
    assert _estimator(tmp_path, resume=True).fitOnShards(shards).summary.steps == STEPS


def test_a_run_is_gone_on_with_or_refused(table, tmp_path):
    run = str(tmp_path / "run")
    (tmp_path / "fails").touch()
    with pytest.raises(WorkerError, match=r"ZeroDivisionError: on purpose; its last checkpoint is kept in "):
        _estimator(tmp_path).fit(table)
    assert _starts(tmp_path) == 2, "what user code raises starts nothing again"
    with pytest.raises(ValueError, match=r"because these changed: weightDecay: 0\.0 -> 0\.1; set them back"):
        _estimator(tmp_path, resume=True, weightDecay=0.1).fit(table)
    with pytest.raises(ValueError, match=r"because these changed: train rows: 96 -> 95; set them back"):
        _estimator(tmp_path, resume=True).fit(table.limit(95))
    (tmp_path / "fails").unlink()
    run = str(Path(run).rename(tmp_path / "moved"))
    model = _estimator(tmp_path, resume=True, runUri=run, numWorkers=1, checkpointEverySteps=7).fit(table)
    assert model.summary.steps == STEPS
    assert model.summary.resumed_steps
    assert _starts(tmp_path) == 3
    # Resuming reads the finished run without training, even after the folder moved. Only the manifest of
    # its rows remains.
    run = str(Path(run).rename(tmp_path / "moved again"))
    again = _estimator(tmp_path, resume=True, runUri=run).fit(table)
    assert _starts(tmp_path) == 3
    assert again.summary == replace(model.summary, run_uri=run)
    assert again.module().state_dict().keys() == {"linear.weight", "linear.bias"}
    assert [path.name for path in Path(run, "shards").iterdir()] == ["manifest.json"]
    with pytest.raises(ValueError, match="has finished without keepTrainingState=True"):
        _estimator(tmp_path, resume=True, runUri=run, epochs=5).fit(table)


def test_a_run_of_given_shards_is_not_gone_on_with_by_a_dataframe(table, shards, tmp_path):
    (tmp_path / "fails").touch()
    with pytest.raises(WorkerError, match="on purpose"):
        _estimator(tmp_path).fitOnShards(shards)
    before = sorted(tmp_path.rglob("*"))
    with pytest.raises(ValueError, match=r"data: shards given to fitOnShards -> a DataFrame; set them back"):
        _estimator(tmp_path, resume=True).fit(table)
    assert sorted(tmp_path.rglob("*")) == before
    (tmp_path / "fails").unlink()
    assert _estimator(tmp_path, resume=True).fitOnShards(shards).summary.steps == STEPS


def test_shards_that_changed_under_a_run_train_nothing(table, tmp_path):
    manifest = write_shards(table, str(tmp_path / "shards"))
    shard = Path(manifest.paths[0])
    (tmp_path / "flag").touch()
    estimator = _estimator(tmp_path, callbacks=[Acts(step_end=partial(damage, tmp_path / "flag", shard))])
    # The restart finds the damage, and the next driver finds it again.
    told = r"shard file '.*\.parquet' differs from the bytes that were written; write the shards again"
    with pytest.raises(ValueError, match=told):
        estimator.fitOnShards(manifest.uri)
    again = estimator.copy({estimator.resume: True})
    with pytest.raises(ValueError, match=told):
        again.fitOnShards(manifest.uri)
    _invert(shard)
    model = again.fitOnShards(manifest.uri)
    assert model.summary.steps == STEPS
    assert model.summary.resumed_steps


def test_a_failure_before_any_checkpoint_leaves_nothing(table, tmp_path):
    (tmp_path / "fails").touch()
    with pytest.raises(WorkerError, match="on purpose"):
        _estimator(tmp_path, checkpointEverySteps=1000).fit(table)
    assert not (tmp_path / "run").exists()


def test_ranks_stop_if_the_folder_of_their_run_is_removed(shards, tmp_path):
    run = tmp_path / "run"
    changes: dict[str, Any] = {"checkpointEverySteps": None, "logEverySteps": 1}
    with pytest.raises(WorkerError, match="/run' was removed, so "):
        _estimator(
            tmp_path, callbacks=[Acts(step_end=partial(remove, str(run)))], timeoutSeconds=2.0, **changes
        ).fitOnShards(shards)
    assert not run.exists()


@pytest.mark.slow
def test_ctrl_c_keeps_the_checkpoint_and_leaves_no_process(shards, tmp_path):
    script = tmp_path / "driver.py"
    script.write_text(
        f"import sys; sys.path[:0] = {sys.path!r}\n"
        "from pathlib import Path\n"
        "from pyspark.sql import SparkSession\n"
        "from tests.estimators.test_resume import _slow\n"
        "SparkSession.builder.master('local[2]').config('spark.ui.enabled', 'false').getOrCreate()\n"
        f"_slow(Path({str(tmp_path)!r}), epochs=1000).fitOnShards({shards!r})\n"
    )
    root = Path(__file__).parents[2]
    driver = subprocess.Popen([sys.executable, str(script)], cwd=root, stderr=subprocess.PIPE, text=True)
    try:
        run = tmp_path / "run"
        folder = RunFolder(str(run), is_given=True)
        wait_for("a checkpoint", lambda: folder.has_checkpoint() or driver.poll() is not None)
        beats = [wait_for("a beat", lambda rank=rank: _beat(run, rank)) for rank in (0, 1)]
        driver.send_signal(signal.SIGINT)
        _, told = driver.communicate(timeout=120)
    finally:
        driver.kill()
        driver.wait()
    assert "KeyboardInterrupt" in told
    assert "fit again with resume=True to resume" in told
    wait_for("the workers' end", lambda: all(has_ended(beat.pid) for beat in beats))
    assert folder.has_checkpoint()
