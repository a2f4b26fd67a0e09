"""The log of losses within an epoch: a mean over all ranks, once per step, also after a resume."""

import json
from dataclasses import asdict
from pathlib import Path

import numpy as np
import pytest
from parity import equal_to_undisturbed
from small_training import Runs

from ringspark.estimators import run_layout
from ringspark.estimators.launch.local import train_here
from ringspark.estimators.training.step_log import read_steps
from ringspark.models import ModelSpec

SETTINGS = {"model": ModelSpec("linear", {"in_features": 4, "out_features": 1}), "log_every_steps": 1}
# Two epochs with 8 steps of 32 rows and one step of 16.
ROWS, STEPS = 272, 9


def test_the_means_of_an_epochs_steps_are_the_epochs_loss(runs: Runs) -> None:
    result = runs.here(ROWS, log_every_steps=3)
    records = read_steps(result.run_uri)
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
def test_the_mean_is_over_the_rows_of_all_ranks(runs: Runs) -> None:
    one, two = (
        [record.train_loss for record in read_steps(train(ROWS).run_uri)] for train in (runs.here, runs.gang)
    )
    assert len(one) == 2 * STEPS
    assert two == pytest.approx(one, rel=1e-5)


def test_steps_that_a_resumed_training_takes_again_count_once(runs: Runs) -> None:
    config = runs.config(ROWS, checkpoint_every_steps=5)
    results = equal_to_undisturbed(config, step=7, train=train_here)
    assert results[1].resumed_steps == (5,)
    whole, records = ([asdict(r) | {"seconds": 0} for r in read_steps(each.run_uri)] for each in results)
    assert records == whole


def test_none_are_kept_where_none_are_asked_for(runs: Runs) -> None:
    uri = runs.here(ROWS, log_every_steps=0).run_uri
    assert not Path(uri, run_layout.STEPS).exists()
    assert read_steps(uri) == []


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
