"""Every rank reports progress while rank 0 writes to a slow store, so no rank counts as hung."""

from dataclasses import replace
from functools import partial
from typing import Any

import fsspec
import pytest
from slow_disk import SlowDisk
from small_training import Runs

from ringspark.estimators.collectives import Collective
from ringspark.estimators.launch.heartbeat import Heartbeat, Pulse
from ringspark.estimators.launch.local import run_spawned
from ringspark.estimators.options.sync import Zero
from ringspark.estimators.training.checkpoint import rank_zero, writer
from ringspark.estimators.training.phase import Status
from ringspark.estimators.training.settings.config import TrainConfig, UserObjects
from ringspark.estimators.training.worker import TrainResult, train_worker
from ringspark.models import ModelSpec
from ringspark.pipelines import storage

SPEC = ModelSpec("mlp", {"in_features": 4, "hidden": [8, 8], "out_features": 1, "norm": "batch"})
SETTINGS = {"model": SPEC}


def _train(config: TrainConfig, pulse: Pulse, collective: Collective, device: str, status: Status) -> str:
    fsspec.register_implementation("slow", SlowDisk, clobber=True)
    SlowDisk.pulse = pulse
    rank_zero.REPORT_SECONDS = 0.0
    writer._LOOK_SECONDS = 0.05
    with Heartbeat(pulse, status, collective.rank, "host", collective.rank):
        result = train_worker(config, collective, UserObjects(), device, status)
        assert result.checkpoint_errors == ()
        # Each write of the weights waits before each of its 14 tensors except the first.
        least = 13 * (2 if config.checkpoint_every_epochs else 1)
        assert collective.rank or SlowDisk.waits >= least
        return result.to_json()


@pytest.mark.distributed
@pytest.mark.parametrize(
    ("collective", "changes"),
    [
        pytest.param("horovod", {"checkpoint_every_epochs": 1}, marks=pytest.mark.slow),
        ("torch", {"checkpoint_every_epochs": 1, "keep": "best"}),
        pytest.param("torch", {"sync": Zero(stage=3)}, marks=pytest.mark.slow),
    ],
)
def test_no_rank_stands_still_during_a_write(runs: Runs, collective: str, changes: dict[str, Any]) -> None:
    """Covers the last weights, the best weights, and a checkpoint that is still being written."""
    config = runs.check(64, num_workers=2, collective=collective, **changes)
    config = replace(config, run_uri=f"slow://{runs.folder}/run")
    beats = runs.folder / "beats"
    pulse = Pulse(run_uri=str(beats), token="t", timeout_seconds=0.4)
    (beats / "heartbeat").mkdir(parents=True)
    texts = run_spawned(2, collective, partial(_train, config, pulse), timeout_seconds=600)
    written = TrainResult.from_json(texts[0]).checkpoint_uri
    assert storage.size(f"{written.replace('slow://', '')}/model.safetensors") > 0
