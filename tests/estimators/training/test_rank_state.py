"""A resume takes no more memory in a larger gang."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from peak_memory import memory_use
from small_training import config_of

from ringspark.estimators.collectives import Collective
from ringspark.estimators.launch.local import run_spawned
from ringspark.estimators.training.checkpoint.resume import Recovery
from ringspark.estimators.training.phase import Status
from ringspark.estimators.training.settings.config import TrainConfig
from ringspark.estimators.training.settings.local_training import LOCAL_STEPS
from ringspark.estimators.training.worker import train_worker
from ringspark.models import ModelSpec
from ringspark.pipelines import ShardManifest

WIDTH = 1024
# A rank's weights and its momentum.
STATE_BYTES = 2 * WIDTH * WIDTH * 4
MakeShards = Callable[..., ShardManifest]


def _peaks(config: TrainConfig, collective: Collective, device: str, status: Status) -> str:
    """Trains a step, and the rest from its checkpoint; returns the peak bytes of the resume."""
    found = {}
    load = Recovery.load

    def measured(*arguments: Any) -> None:
        found["load"] = memory_use(lambda: load(*arguments)).peak

    Recovery.load = measured  # type: ignore[method-assign]
    for epochs in (1, 2):
        train_worker(replace(config, epochs=epochs), collective, None, device, status)
    return json.dumps(found)


@pytest.mark.distributed
def test_a_rank_holds_the_state_of_one_other_rank_at_most(make_shards: MakeShards, tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    manifest = make_shards({"x": rng.normal(size=(64, WIDTH)).astype(np.float32), "y": np.zeros(64)})
    assert LOCAL_STEPS.convert is not None
    config = config_of(
        manifest,
        tmp_path / "run",
        model=ModelSpec("mlp", {"in_features": WIDTH, "hidden": [WIDTH], "out_features": 1}).to_json(),
        optimizer="momentum",
        num_workers=5,
        local_steps=LOCAL_STEPS.convert("training"),
        checkpoint_every_steps=1,
        collective="torch",
    )
    texts = run_spawned(5, "torch", partial(_peaks, config), timeout_seconds=120)
    peaks = [json.loads(text) for text in texts]
    assert max(own["load"] for own in peaks) < 3 * STATE_BYTES, peaks
