"""Selection of the best epoch."""

from dataclasses import replace
from math import nan
from typing import Any

from ringspark.estimators.training.history import EpochRecord
from ringspark.estimators.training.selection import BestEpoch
from ringspark.estimators.training.settings.config import TrainConfig

CONFIG = TrainConfig(
    shards_uri="", run_uri="", input_columns=("x",), label_columns=("y",), monitor="train_loss"
)


def _record(epoch: int, loss: float = 1.0, **metrics: float) -> EpochRecord:
    values: dict[str, Any] = {"steps": 1, "rows": 1, "seconds": 1.0, "learning_rate": 0.1}
    return EpochRecord(epoch=epoch, train_loss=loss, validation_loss=None, metrics=metrics, **values)


def test_a_change_of_exactly_min_delta_and_a_nan_are_no_improvement() -> None:
    best = BestEpoch(CONFIG, min_delta=0.25)
    losses = [nan, 1.0, 0.75, nan, 0.5, 0.375, 0.125]
    assert [best.update(_record(i, loss)) for i, loss in enumerate(losses)] == [0, 1, 0, 0, 1, 0, 1]
    without = BestEpoch(CONFIG)
    assert [without.update(_record(epoch)) for epoch in (1, 2)] == [True, False], "equal is not better"


def test_the_best_of_a_metric_goes_its_way() -> None:
    best = BestEpoch(replace(CONFIG, monitor="validation_auroc", metrics=("auroc",)), min_delta=0.1)
    values = [nan, 0.5, 0.55, 0.7, 0.1, nan]
    improved = [best.update(_record(i + 1, validation_auroc=v)) for i, v in enumerate(values)]
    assert improved == [False, True, False, True, False, False]
    assert (best.epoch, best.value) == (4, 0.7)
