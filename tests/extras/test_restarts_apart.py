"""Gangs with local SGD or asynchronous training recover from one fault under the real supervisor."""

import os
import random
import signal
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import processes
import psutil
import pytest
import rows
import sockets
import torch
from acting_callback import Acts
from driver import STRUCK, Diary, Network
from short_sync import sync_of
from spark_tables import on_this_host
from waiting import wait_for

from ringspark.estimators import DiLoCo, TorchEstimator, TrainingState
from ringspark.estimators.launch.heartbeat import Beat
from ringspark.pipelines import write_shards

pytestmark = [pytest.mark.spark, pytest.mark.distributed, pytest.mark.slow, on_this_host]

ROWS, BATCH, EPOCHS, EVERY = 385, 16, 2, 5
EPOCH_STEPS = -(-ROWS // BATCH)  # the last has one row
TIMEOUT_SECONDS = 10.0

WAYS: dict[str, dict[str, Any]] = {
    "ssp": {"sync": sync_of(apart={"name": "ssp", "staleness": 2})},
    "asp": {"sync": sync_of(apart={"name": "asp", "correction": "staleness"})},
    "hogwild": {"sync": sync_of(apart="hogwild")},
    "average": {"sync": sync_of(local={"steps": 4, "optimizerState": "average"})},
    "one-shot": {"sync": sync_of(local="training")},
    "streaming": {"sync": DiLoCo(steps=4, fragments=2, delay=1, outer_momentum=0.5)},
    "elastic": {"sync": sync_of(local={"name": "elastic", "steps": 3})},
}
KILL, STOP = signal.SIGKILL, signal.SIGSTOP
# Each rank serves a shard of the table, so each is killed once. Rank 0 also writes the checkpoints.
HITS = [
    ("ssp", KILL, 0, "torch"),
    ("asp", KILL, 1, "torch"),
    ("hogwild", KILL, 0, "torch"),
    ("average", KILL, 1, "torch"),
    ("one-shot", KILL, 0, "torch"),
    ("streaming", KILL, 0, "horovod"),
    ("elastic", KILL, 1, "torch"),
    ("ssp", STOP, 1, "torch"),
    ("hogwild", STOP, 1, "horovod"),
]


@pytest.fixture(scope="module")
def shards(spark: Any, tmp_path_factory: pytest.TempPathFactory) -> str:
    features = "transform(sequence(1, 8), k -> cast(sin(id * k) as float)) as features"
    frame = spark.range(0, ROWS, 1, 2).selectExpr("id", features)
    frame = frame.selectExpr("*", "features[0] - features[1] as label")
    uri = str(tmp_path_factory.mktemp("data") / "shards")
    return write_shards(frame, uri, num_files=2, row_group_rows=50).uri


def _estimator(root: Path, way: str, **changes: Any) -> TorchEstimator:
    torch.manual_seed(0)
    (root / "diary").mkdir(exist_ok=True)
    sizes = {"epochs": EPOCHS, "batchSize": BATCH, "optimizer": "momentum", "learningRate": 0.01}
    gang = {"numWorkers": 2, "collective": "torch", "reader": "arrow", "runUri": str(root / "run")}
    restarts = {"maxRestarts": 2, "checkpointEverySteps": EVERY, "timeoutSeconds": TIMEOUT_SECONDS}
    diary = {"callbacks": [Diary(str(root / "diary"), 0.03)], "showProgress": False}
    params = {"loss": "mse", "inputCols": ["features", "id"], **sizes, **gang, **restarts, **diary}
    return TorchEstimator(model=Network(0.0), **params | WAYS[way] | changes)


@contextmanager
def _hit(root: Path, rank: int, number: signal.Signals, draw: random.Random) -> Iterator[list[Beat]]:
    """Sends a signal to a rank's process at a random step. Yields the heartbeats of the hit ranks."""
    hits: list[Beat] = []
    file = root / "run" / "heartbeat" / f"rank-{rank}.json"
    diaries = rows.Diaries(root / "diary")
    step = draw.randrange(EVERY + 2, int(0.8 * EPOCHS * EPOCH_STEPS))

    def hit() -> None:
        try:
            wait_for(f"step {step}", lambda: len(rows.steps_of(diaries.read(), rank)) >= step)
            time.sleep(0.05 * draw.random())
            beat = wait_for("a beat", lambda: file.exists() and Beat.from_json(file.read_bytes()))
            os.kill(beat.pid, number)
            hits.append(beat)
        finally:
            (root / "diary" / STRUCK).touch()

    thread = threading.Thread(target=hit)
    thread.start()
    try:
        yield hits
    finally:
        thread.join()


def _left_over(pids: list[int], collective: str) -> list[str]:
    """Returns ports and mutual connections of ranks whose training has ended."""
    found = [port for pid in pids for port in processes.ports_of(psutil.Process(pid))]
    if collective == "horovod":
        return found  # it keeps Gloo's connections after its shutdown, also with synchronous ranks
    with sockets.between(pids) as connections:
        found += [f"{c.getsockname()} with {c.getpeername()}" for c in connections]
    return found


@pytest.mark.parametrize(("way", "number", "rank", "collective"), HITS)
def test_a_rank_that_is_hit_costs_no_row(
    shards: str, tmp_path: Path, way: str, number: signal.Signals, rank: int, collective: str
) -> None:
    memory = set(os.listdir("/dev/shm"))
    estimator = _estimator(tmp_path, way, collective=collective)
    draw = random.Random(f"{way}, {number}, {rank}, {collective}")
    with _hit(tmp_path, rank, number, draw) as hits:
        model = estimator.fitOnShards(shards)
    summary = model.summary
    assert (len(hits), summary.restarts, len(summary.resumed_steps)) == (1, 1, 1)
    if number == STOP:
        assert f"rank {rank} on host " in summary.restart_reasons[0]
        assert "has sent no heartbeat" in summary.restart_reasons[0]
    assert (summary.steps, summary.rows) == (EPOCHS * EPOCH_STEPS, EPOCHS * ROWS)
    assert not summary.checkpoint_errors
    lines = rows.Diaries(tmp_path / "diary").read()
    trained = rows.check(lines, ROWS)
    assert (trained.problems, trained.steps) == ([], EPOCHS * EPOCH_STEPS)
    losses = [epoch.train_loss for epoch in summary.epochs]
    assert losses[-1] < losses[0]
    wait_for("the end of the one that was hit", lambda: processes.has_ended(hits[0].pid))
    pids = sorted({line["pid"] for line in lines if not processes.has_ended(line["pid"])})
    assert _left_over(pids, collective) == []
    assert {name for name in os.listdir("/dev/shm") if "ringspark" in name} <= memory


def _sleep(state: TrainingState) -> None:
    """Makes an epoch of rank 1 take longer than the heartbeat timeout, but not one step."""
    if state.rank == 1:
        time.sleep(1.5 * TIMEOUT_SECONDS / EPOCH_STEPS)


@pytest.mark.parametrize("way", ["ssp", "asp", "hogwild"])
def test_who_waits_by_design_is_not_taken_for_hung(shards: str, tmp_path: Path, way: str) -> None:
    estimator = _estimator(tmp_path, way, callbacks=[Acts(step_end=_sleep)], epochs=1, maxRestarts=0)
    summary = estimator.fitOnShards(shards).summary
    assert (summary.steps, summary.restarts) == (EPOCH_STEPS, 0)
    assert summary.epochs[0].seconds > TIMEOUT_SECONDS
