"""`train_worker` with gradient compression: complete, failed and resumed runs."""

from __future__ import annotations

import os
import random
import signal
import threading
import time
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from failing_callback import Fails
from registries import names_of
from small_training import config_of, train_gang, weights_of

from ringspark.estimators import WorkerError
from ringspark.estimators.options.compression import Compression
from ringspark.estimators.options.sync import AllReduce
from ringspark.estimators.training.callbacks import Callback, TrainingState
from ringspark.estimators.training.settings.config import TrainConfig, UserObjects
from ringspark.extras.compressors import COMPRESSORS
from ringspark.models import ModelSpec
from ringspark.pipelines import ShardManifest

pytestmark = pytest.mark.distributed
SPEC = ModelSpec("mlp", {"in_features": 16, "hidden": [64, 64], "out_features": 1, "dropout": 0.1})
MakeShards = Callable[..., ShardManifest]
_weights = partial(weights_of, module=SPEC.build())


def _config(make_shards: MakeShards, folder: Path, compression: Any, **changes: Any) -> TrainConfig:
    rng = np.random.default_rng(0)
    x = rng.normal(size=(330, 16)).astype(np.float32)
    manifest = make_shards({"x": x, "y": x.sum(1).astype(np.float32)})
    return config_of(
        manifest,
        folder,
        model=SPEC.to_json(),
        optimizer="momentum",
        learning_rate=0.001,
        sync=AllReduce(compression=Compression.of(compression)),
        **{"num_workers": 2, "collective": "torch", "checkpoint_every_steps": 2, "keep_checkpoints": 9}
        | changes,
    )


@pytest.mark.parametrize("name", names_of(COMPRESSORS, ["topk", "powersgd", "gradiveq"]))
def test_a_failed_training_goes_on_as_if_nothing_had_happened(
    make_shards: MakeShards, tmp_path: Path, name: str
) -> None:
    options = {"slice": 32, "components": 4, "samples": 3, "refresh": 5} if name == "gradiveq" else {}
    config = _config(make_shards, tmp_path / "run", {"name": name, "after": 1, **options})
    straight = _weights(train_gang(replace(config, run_uri=str(tmp_path / "straight"))))
    objects = UserObjects(callbacks=(Fails(tmp_path / "failed"),))
    with pytest.raises(WorkerError, match="step 7"):
        train_gang(config, objects)
    resumed = train_gang(config, objects)
    assert resumed.resumed_steps == (6,)
    assert _weights(resumed).equal(straight)


@pytest.mark.parametrize(
    ("workers", "next_workers"), [(2, 3), (2, 1), pytest.param(3, 2, marks=pytest.mark.slow)]
)
def test_a_resumed_training_may_have_other_workers(
    make_shards: MakeShards, tmp_path: Path, workers: int, next_workers: int
) -> None:
    """The resumed run loses about as much as an uninterrupted one: dropout draws by rank."""
    config = _config(make_shards, tmp_path / "run", {"name": "topk", "ratio": 0.3}, num_workers=workers)
    straight = train_gang(replace(config, run_uri=str(tmp_path / "straight"))).history
    objects = UserObjects(callbacks=(Fails(tmp_path / "failed"),))
    with pytest.raises(WorkerError, match="step 7"):
        train_gang(config, objects)
    resumed = train_gang(replace(config, num_workers=next_workers), UserObjects(callbacks=objects.callbacks))
    assert resumed.resumed_steps == (6,)
    first, last = straight[0].train_loss, straight[-1].train_loss
    assert abs(resumed.history[-1].train_loss - last) < 0.3 * (first - last)


def test_fp16_trains_with_residuals_that_its_loss_scale_does_not_touch(
    make_shards: MakeShards, tmp_path: Path
) -> None:
    """First steps overflow and are skipped, which halves the scale; residuals kept in another scale
    would be sent twice or half as large, and the loss would not fall as in full precision."""
    config = _config(make_shards, tmp_path / "run", {"name": "topk", "ratio": 0.1}, epochs=6)
    whole = train_gang(config).history
    result = train_gang(replace(config, precision="fp16", run_uri=str(tmp_path / "fp16")))
    assert torch.isfinite(_weights(result)).all()
    assert result.history[0].skipped_steps > 0
    drops = [run[0].train_loss - run[-1].train_loss for run in (whole, result.history)]
    assert drops[1] > 0.8 * drops[0]


@pytest.mark.slow
@pytest.mark.parametrize("name", names_of(COMPRESSORS))
def test_every_compressor_trains_nearly_as_whole_gradients_do(
    make_shards: MakeShards, tmp_path: Path, name: str
) -> None:
    options = {
        "gradiveq": {"slice": 32, "components": 8, "samples": 3},
        "randomk": {"ratio": 0.2},  # a share of 0.01 needs too many steps to send everything
        "cpsgd": {"levels": 4096, "trials": 4, "max_norm": 32.0},
    }.get(name, {})
    config = _config(make_shards, tmp_path / "whole", "none", epochs=8)
    compression = Compression.of({"name": name, **options})
    compressed = replace(config, run_uri=str(tmp_path / "other"), sync=AllReduce(compression=compression))
    whole, other = (train_gang(one).history for one in (config, compressed))
    # Compression keeps most of the loss decrease; a wrong gradient would keep none.
    assert whole[0].train_loss - other[-1].train_loss > 0.7 * (whole[0].train_loss - whole[-1].train_loss)


class Dies(Callback):
    """Kills this process at a random moment, `kills` times."""

    def __init__(self, folder: Path, kills: int) -> None:
        self._folder = folder
        self._kills = kills

    def on_train_start(self, state: TrainingState) -> None:
        done = len(list(self._folder.iterdir()))
        draw = random.Random(done)
        rank, seconds = draw.randrange(state.size), draw.uniform(0.0, 0.25)
        if done < self._kills and rank == state.rank:
            timer = threading.Timer(seconds, self._die, [done])
            timer.daemon = True
            timer.start()

    def _die(self, number: int) -> None:
        (self._folder / str(number)).touch()
        os.kill(os.getpid(), signal.SIGKILL)

    def on_step_end(self, state: TrainingState) -> None:
        time.sleep(0.005)


@pytest.mark.slow
def test_twenty_kills_at_random_moments_leave_the_weights_as_they_would_have_been(
    make_shards: MakeShards, tmp_path: Path
) -> None:
    kills, folder = 20, tmp_path / "kills"
    folder.mkdir()
    config = _config(make_shards, tmp_path / "run", "topk", epochs=40)
    straight = _weights(train_gang(replace(config, run_uri=str(tmp_path / "straight"))))
    objects = UserObjects(callbacks=(Dies(folder, kills),))
    lost = 0
    while True:
        try:
            result = train_gang(config, objects)
            break
        except WorkerError:
            lost += 1
    assert lost == kills
    assert _weights(result).equal(straight)
