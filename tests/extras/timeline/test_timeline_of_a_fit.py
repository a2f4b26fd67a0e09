"""The timeline of a fit on Spark with a killed worker, as a trace for Perfetto."""

import os
import signal
import time
from pathlib import Path
from typing import Any

import pytest
from spark_tables import on_this_host

from ringspark.estimators import Callback, TorchRegressor, TrainingState
from ringspark.extras.timeline.trace import chrome_trace, time_shares
from ringspark.models import ModelSpec

RANKS, EPOCHS, STEPS, KILLED_AT = 3, 4, 24, 15

pytestmark = [pytest.mark.spark, pytest.mark.slow, on_this_host]


class KilledOnce(Callback):
    """Makes each step slow, and kills rank 1 in a step if `path` exists."""

    def __init__(self, path: Path) -> None:
        self._path = str(path)

    def on_step_end(self, state: TrainingState) -> None:
        time.sleep(0.05)
        if state.step == KILLED_AT and state.rank == 1 and os.path.exists(self._path):
            os.unlink(self._path)
            os.kill(os.getpid(), signal.SIGKILL)


@pytest.fixture(scope="module")
def trained(spark: Any, tmp_path_factory: pytest.TempPathFactory) -> Any:
    folder = tmp_path_factory.mktemp("timeline")
    (folder / "kills").touch()
    frame = spark.range(0, 192, 1, 2)
    frame = frame.selectExpr("array(sin(id), cos(id)) as features", "sin(2 * id) as label")
    network = ModelSpec("mlp", {"in_features": 2, "hidden": [16], "out_features": 1})
    sizes = {"epochs": EPOCHS, "batchSize": 32, "numWorkers": RANKS, "collective": "torch"}
    records = {"runUri": str(folder / "run"), "checkpointEverySteps": 5, "timelineEverySteps": 1}
    callback = KilledOnce(folder / "kills")
    return TorchRegressor(model=network, callbacks=[callback], **sizes, **records).fit(frame)


@pytest.fixture(scope="module")
def events(trained: Any) -> list[dict[str, Any]]:
    return chrome_trace(trained.summary.run_uri)["traceEvents"]


def test_the_trace_has_all_ranks_of_both_starts(trained: Any, events: list[dict[str, Any]]) -> None:
    assert trained.summary.restarts == 1
    (resumed,) = trained.summary.resumed_steps
    wholes = [event for event in events if event.get("cat") == "whole step"]
    names = {e["tid"]: e["args"]["name"] for e in events if e["name"] == "thread_name"}
    steps: dict[tuple[str, int], list[int]] = {}
    for event in wholes:
        steps.setdefault((names[event["tid"]], event["args"]["start"]), []).append(event["args"]["step"])
    second = {rank: found for (rank, start), found in steps.items() if start == 2}
    assert second == {f"rank {rank}": list(range(resumed + 1, STEPS + 1)) for rank in range(RANKS)}
    # The killed rank loses its records in memory, unless ten seconds have passed.
    first = {rank: found for (rank, start), found in steps.items() if start == 1}
    assert {"rank 0", "rank 2"} <= first.keys()
    for found in first.values():
        assert found == list(range(1, len(found) + 1))
        assert KILLED_AT - 1 <= len(found) <= KILLED_AT
    ends = [e["ts"] + e["dur"] for e in wholes if e["args"]["start"] == 1]
    assert max(ends) < min(e["ts"] for e in wholes if e["args"]["start"] == 2)


def test_the_spans_of_a_thread_lie_within_each_other_or_one_after_the_other(events: Any) -> None:
    """Perfetto drops a slice that partly overlaps another slice of its thread."""
    spans = [event for event in events if event["ph"] == "X"]
    assert len(spans) > RANKS * STEPS * 5
    for thread in {(e["pid"], e["tid"]) for e in spans}:
        own = [e for e in spans if (e["pid"], e["tid"]) == thread]
        assert [e["ts"] for e in own] == sorted(e["ts"] for e in own)
        open_ends: list[float] = []
        for event in own:
            begin, end = event["ts"], event["ts"] + event["dur"]
            # Numbers are rounded to a thousandth of a microsecond.
            while open_ends and open_ends[-1] <= begin + 2e-3:
                open_ends.pop()
            assert not open_ends or end <= open_ends[-1] + 2e-3, event
            open_ends.append(end)


def test_the_shares_of_the_time_are_those_of_all_starts(trained: Any) -> None:
    shares = time_shares(trained.summary.run_uri)
    assert sorted(shares) == list(range(RANKS))
    for own in shares.values():
        assert sum(own.values()) == pytest.approx(1)
        # The callback sleeps, and no span covers its time.
        assert own["other"] > 0.3
        assert own["checkpoint"] > 0


def test_the_history_has_the_cost_of_each_epoch(trained: Any) -> None:
    history = trained.summary.history
    assert (history.rows_per_second > 0).all()
    # The checkpoint was in the middle of its epoch, so the bytes sent before it are not known.
    (resumed,) = trained.summary.resumed_steps
    in_its_midst = resumed // (STEPS // EPOCHS)
    assert list(history.bytes_sent.isna()) == [number == in_its_midst for number in range(EPOCHS)]
    assert history.flops.nunique() == 1
