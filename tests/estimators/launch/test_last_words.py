"""What a process wrote to standard error before a native library ended it."""

from __future__ import annotations

import ctypes
import os
import resource
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from waiting import wait_for

from ringspark.estimators import Callback, TorchRegressor, TrainingState, WorkerError
from ringspark.estimators.collectives import Collective
from ringspark.estimators.launch.local import run_spawned
from ringspark.estimators.training.phase import Status
from ringspark.models import ModelSpec

LIBRARY = b"terminate called after throwing an instance of 'gloo::EnforceNotMet'\n"

RANK = """
import os, sys, time
from ringspark.estimators.launch.heartbeat import Pulse
from ringspark.estimators.launch.last_words import LastWords

print("before", file=sys.stderr)
with LastWords(Pulse(run_uri=sys.argv[1], token="t"), 3):
    # A child that lives longer holds the rank's standard error open.
    child = os.fork()
    if not child:
        time.sleep(600)
    print(child, flush=True)
    for number in range(400_000):
        os.write(2, b"line %d\\n" % number)
    if sys.argv[2] == "dies":
        os._exit(9)
    os.kill(child, 9)
    os.wait()
print("after", file=sys.stderr)
"""


def _end_as_a_library_does() -> None:
    """By std::terminate: a line on the C library's stderr, then abort()."""
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    libc = ctypes.CDLL(None)
    libc.write(2, LIBRARY, len(LIBRARY))
    libc.abort()


def _rank_one_aborts(collective: Collective, device: str, status: Status) -> str:
    if collective.rank == 1:
        _end_as_a_library_does()
    collective.barrier()
    return "unreachable"


@pytest.mark.distributed
def test_a_local_rank_that_aborts_says_what_the_library_said() -> None:
    with pytest.raises(WorkerError, match="ended with exit code -6") as caught:
        run_spawned(2, "torch", _rank_one_aborts)
    told = str(caught.value)
    assert LIBRARY.decode().strip() in told


class _Aborts(Callback):
    def on_epoch_end(self, state: TrainingState) -> None:
        if state.rank == 1:
            _end_as_a_library_does()


@pytest.mark.slow
@pytest.mark.spark
def test_a_training_that_a_library_ends_says_what_the_library_said(spark: Any, tmp_path: Path) -> None:
    table = spark.range(64).selectExpr("array(double(id) / 64) as x", "double(id) / 32 as y")
    estimator = TorchRegressor(
        model=ModelSpec("linear", {"in_features": 1, "out_features": 1}),
        inputCols=["x"],
        labelCol="y",
        batchSize=16,
        numWorkers=2,
        callbacks=[_Aborts()],
        maxRestarts=0,
        storageUri=str(tmp_path / "storage"),
        showProgress=False,
    )
    with pytest.raises(WorkerError, match=r"^rank 1 on host .* its process died") as caught:
        estimator.fit(table)
    assert str(caught.value).endswith(f"  | {LIBRARY.decode().strip()}")
    assert not list((tmp_path / "storage").rglob("*.stderr")), "nothing is left of the run"


@pytest.mark.parametrize("end", ["dies", "leaves"])
def test_every_line_reaches_the_log_and_the_last_ones_the_run(tmp_path: Path, end: str) -> None:
    """Also while a child of the rank, which holds its standard error too, lives longer than the rank."""
    (tmp_path / "heartbeat").mkdir()
    log, stored = tmp_path / "log", tmp_path / "heartbeat" / "rank-3.stderr"
    lines = ["before", *(f"line {number}" for number in range(400_000)), "after"]
    with (tmp_path / "child").open("wb") as child, log.open("ab") as file:
        code = subprocess.call([sys.executable, "-c", RANK, str(tmp_path), end], stdout=child, stderr=file)
    if end == "leaves":
        assert code == 0
        assert log.read_text().splitlines() == lines
        assert not stored.exists()
        return
    assert code == 9
    wait_for("the witness", stored.exists)
    os.kill(int((tmp_path / "child").read_text()), signal.SIGKILL)
    assert log.read_text().splitlines() == lines[:-1]
    launch, _, *last = stored.read_text().splitlines()
    assert launch == "t 0"
    assert last == lines[-1 - len(last) : -1]
    assert os.stat(stored).st_size < 1 << 17
