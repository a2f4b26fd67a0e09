"""Values that callbacks log on each rank are in the epoch's metrics."""

from collections.abc import Callable
from pathlib import Path

import pytest
from parity import equal_to_undisturbed
from small_training import columns_of, config_of, train_gang

from ringspark.estimators import WorkerError
from ringspark.estimators.training.callbacks import Callback, TrainingState
from ringspark.estimators.training.settings.config import UserObjects
from ringspark.models import ModelSpec
from ringspark.pipelines import ShardManifest

LINEAR = ModelSpec("linear", {"in_features": 4})


class Logs(Callback):
    def on_train_start(self, state: TrainingState) -> None:
        state.log("start", 1)

    def on_step_end(self, state: TrainingState) -> None:
        state.log("place", 100 * state.rank + state.step)


@pytest.mark.distributed
def test_each_rank_logs_its_own_mean_also_over_a_failure(
    make_shards: Callable[..., ShardManifest], tmp_path: Path
) -> None:
    """Three steps per epoch; the training fails in the middle of the second epoch."""
    config = config_of(
        make_shards(columns_of(96)),
        tmp_path / "run",
        model=LINEAR,
        num_workers=2,
        collective="torch",
        checkpoint_every_steps=1,
    )
    for result in equal_to_undisturbed(config, UserObjects(callbacks=(Logs(),)), step=5):
        found = [epoch.metrics for epoch in result.history]
        assert found == [
            {"place_rank0": 2.0, "place_rank1": 102.0, "start_rank0": 1.0, "start_rank1": 1.0},
            {"place_rank0": 5.0, "place_rank1": 105.0},
        ]


def test_a_value_that_is_not_finite_is_refused(
    make_shards: Callable[..., ShardManifest], tmp_path: Path
) -> None:
    class Spoils(Callback):
        def on_step_end(self, state: TrainingState) -> None:
            state.log("ratio", float("nan"))

    config = config_of(make_shards(columns_of(64)), tmp_path / "run", model=LINEAR)
    with pytest.raises(WorkerError, match="logged ratio=nan; log finite numbers only"):
        train_gang(config, UserObjects(callbacks=(Spoils(),)))
