"""The timeline of a fit on Spark with a killed worker, as a trace for Perfetto."""

import time
from pathlib import Path
from typing import Any

import pytest
from acting_callback import Acts
from failing_callback import Dies
from spark_tables import on_this_host, waves

from ringspark.estimators import TorchRegressor
from ringspark.extras.timeline.trace import chrome_trace
from ringspark.models import ModelSpec

RANKS, EPOCHS, STEPS, KILLED_AT = 3, 4, 24, 15

pytestmark = [pytest.mark.spark, pytest.mark.slow, on_this_host]


def test_the_trace_has_all_ranks_of_both_starts(spark: Any, tmp_path: Path) -> None:
    network = ModelSpec("mlp", {"in_features": 2, "hidden": [16], "out_features": 1})
    sizes = {"epochs": EPOCHS, "batchSize": 32, "numWorkers": RANKS, "collective": "torch"}
    records = {"runUri": str(tmp_path / "run"), "checkpointEverySteps": 5, "timelineEverySteps": 1}
    slows = Acts(step_end=lambda state: time.sleep(0.05))
    callbacks = [slows, Dies(tmp_path / "died", KILLED_AT, rank=1)]
    stage = TorchRegressor(model=network, callbacks=callbacks, **sizes, **records)
    summary = stage.fit(waves(spark, 192)).summary
    assert summary.restarts == 1
    (resumed,) = summary.resumed_steps
    events = chrome_trace(summary.run_uri)["traceEvents"]
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
