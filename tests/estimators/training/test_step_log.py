"""The log of losses within an epoch: a mean over all ranks, once per step, also after a resume."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path

import numpy as np
import pytest
from small_training import config_of, train_gang

from ringspark.estimators import run_layout
from ringspark.estimators.launch.local import train_here
from ringspark.estimators.training.callbacks import Callback, TrainingState
from ringspark.estimators.training.settings.config import UserObjects
from ringspark.estimators.training.step_log import read_steps
from ringspark.models import ModelSpec
from ringspark.pipelines import ShardManifest

MakeShards = Callable[..., ShardManifest]
LINEAR = ModelSpec("linear", {"in_features": 4, "out_features": 1}).to_json()
# Two epochs with 8 steps of 32 rows and one step of 16.
ROWS, STEPS = 272, 9


@pytest.fixture
def manifest(make_shards: MakeShards) -> ShardManifest:
    x = np.random.default_rng(0).normal(size=(ROWS, 4)).astype(np.float32)
    return make_shards({"x": x, "y": x.sum(1)})


def test_the_means_of_an_epochs_steps_are_the_epochs_loss(manifest: ShardManifest, tmp_path: Path) -> None:
    result = train_here(config_of(manifest, tmp_path, model=LINEAR, log_every_steps=3), UserObjects())
    records = read_steps(str(tmp_path))
    assert [(record.step, record.epoch) for record in records] == [
        (step, 1 + (step > STEPS)) for step in range(3, 2 * STEPS + 1, 3)
    ]
    for epoch in result.history:
        own = [record for record in records if record.epoch == epoch.epoch]
        begun = [(epoch.epoch - 1) * ROWS, *(record.rows for record in own)]
        # Means are over rows, and the last step has fewer rows.
        mean = np.average([record.train_loss for record in own], weights=np.diff(begun))
        assert mean == pytest.approx(epoch.train_loss, rel=1e-6)
        assert begun[-1] == epoch.epoch * ROWS


@pytest.mark.distributed
def test_the_mean_is_over_the_rows_of_all_ranks(manifest: ShardManifest, tmp_path: Path) -> None:
    found = []
    for ranks in (1, 2):
        run = tmp_path / str(ranks)
        settings = {"num_workers": ranks, "collective": "torch" if ranks > 1 else "local"}
        train_gang(config_of(manifest, run, model=LINEAR, log_every_steps=1, **settings))
        found.append([record.train_loss for record in read_steps(str(run))])
    assert len(found[0]) == 2 * STEPS
    assert found[1] == pytest.approx(found[0], rel=1e-5)


class StopsOnce(Callback):
    """Raises after step 7, in the first of two trainings."""

    def __init__(self) -> None:
        self.stops = True

    def on_step_end(self, state: TrainingState) -> None:
        if self.stops and state.step == 7:
            raise RuntimeError("stopped")


def test_steps_that_a_resumed_training_takes_again_count_once(
    manifest: ShardManifest, tmp_path: Path
) -> None:
    expected = tmp_path / "whole"
    train_here(config_of(manifest, expected, model=LINEAR, log_every_steps=1), UserObjects())
    callback = StopsOnce()
    objects = UserObjects(callbacks=(callback,))
    config = config_of(manifest, tmp_path / "cut", model=LINEAR, log_every_steps=1, checkpoint_every_steps=5)
    with pytest.raises(RuntimeError, match="stopped"):
        train_here(config, objects)
    callback.stops = False
    assert train_here(config, objects).resumed_steps == (5,)
    records, whole = (
        [asdict(r) | {"seconds": 0} for r in read_steps(str(run))] for run in (tmp_path / "cut", expected)
    )
    assert records == whole


def test_none_are_kept_where_none_are_asked_for(manifest: ShardManifest, tmp_path: Path) -> None:
    train_here(config_of(manifest, tmp_path, model=LINEAR, log_every_steps=0), UserObjects())
    assert not (tmp_path / run_layout.STEPS).exists()
    assert read_steps(str(tmp_path)) == []


def test_a_damaged_file_is_named(tmp_path: Path) -> None:
    folder = tmp_path / run_layout.STEPS
    folder.mkdir()
    (folder / "0.json").write_text(json.dumps([{"step": "one"}]))
    with pytest.raises(ValueError, match=r"0\.json is damaged \(.*'epoch' is missing\); remove it"):
        read_steps(str(tmp_path))


def test_later_steps_of_a_start_before_a_resume_are_forgotten(tmp_path: Path) -> None:
    common = {"epoch": 1, "rows": 1, "seconds": 1.0, "train_loss": 1.0, "learning_rate": 1.0}
    (tmp_path / run_layout.STEPS).mkdir()
    for number, steps in enumerate(([1, 2, 3, 4], [3])):
        text = json.dumps([{"step": step} | common for step in steps])
        (tmp_path / run_layout.STEPS / f"{number}.json").write_text(text)
    assert [record.step for record in read_steps(str(tmp_path))] == [1, 2, 3]
