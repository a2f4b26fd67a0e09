"""Selection of the best epoch."""

import math

from ringspark.estimators.training.history import EpochRecord
from ringspark.estimators.training.selection import BestEpoch
from ringspark.estimators.training.settings.config import TrainConfig


def test_a_change_of_exactly_min_delta_and_a_nan_are_no_improvement() -> None:
    config = TrainConfig(
        shards_uri="/s", run_uri="/r", input_columns=("x",), label_columns=("y",), monitor="train_loss"
    )
    best = BestEpoch(config, min_delta=0.25)
    losses = [math.nan, 1.0, 0.75, math.nan, 0.5, 0.375, 0.125]
    records = [
        EpochRecord(
            epoch=epoch,
            steps=1,
            rows=1,
            seconds=1.0,
            learning_rate=0.1,
            train_loss=loss,
            validation_loss=None,
        )
        for epoch, loss in enumerate(losses, 1)
    ]
    assert [record.epoch for record in records if best.update(record)] == [2, 5, 7]
