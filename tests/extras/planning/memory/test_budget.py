"""`memoryBudget` fails before a gang starts, and only warns about networks that it cannot analyse."""

import warnings
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from small_training import config_of
from torch import nn

from ringspark.estimators import TorchEstimator
from ringspark.estimators.options.sync import Zero
from ringspark.estimators.training.settings.config import UserObjects
from ringspark.extras.planning.memory.budget import check_budget
from ringspark.extras.planning.memory.columns import shard_columns
from ringspark.extras.planning.memory.planner import Planner
from ringspark.models import ModelSpec
from ringspark.pipelines import ShardManifest

WIDE = ModelSpec("mlp", {"in_features": 2, "hidden": [64] * 6, "out_features": 1})


class Branches(nn.Module):
    """A network with data-dependent control flow."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(2, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layer(x if x.sum() > 0 else -x)


def test_the_budget_is_kept_in_bytes() -> None:
    assert TorchEstimator().getMemoryBudget() is None
    assert TorchEstimator(memoryBudget="4g").getMemoryBudget() == 4 << 30
    assert TorchEstimator().setMemoryBudget(1000).getMemoryBudget() == 1000
    with pytest.raises(ValueError, match="memoryBudget must be bytes"):
        TorchEstimator(memoryBudget="four")


@pytest.mark.spark
def test_fit_refuses_what_does_not_fit_and_names_what_would(spark: Any, tmp_path: Path) -> None:
    frame = spark.range(64).selectExpr("array(double(id), -double(id)) as features", "double(id) as label")
    estimator = TorchEstimator(
        model=WIDE,
        batchSize=4096,
        numWorkers=2,
        memoryBudget="1500k",
        storageUri=str(tmp_path),
        showProgress=False,
    )
    sentence = (
        r"training needs \d\.\d MiB per worker, memoryBudget is 1\.5 MiB; "
        r"gradientAccumulation=\d+ needs [\d.]+ [KM]iB"
    )
    with pytest.raises(ValueError, match=sentence):
        estimator.fit(frame)
    assert not list(tmp_path.glob("run-*"))


@pytest.mark.spark
def test_a_network_that_cannot_be_judged_is_trained_with_a_warning(spark: Any, tmp_path: Path) -> None:
    frame = spark.range(64).selectExpr("array(double(id), -double(id)) as features", "double(id) as label")
    estimator = TorchEstimator(
        model=Branches(),
        batchSize=32,
        learningRate=1e-6,
        memoryBudget="4g",
        storageUri=str(tmp_path),
        showProgress=False,
    )
    # pytest.warns would raise Spark's unclosed-socket warnings again without the module name for the
    # filters.
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        assert estimator.fit(frame) is not None
    said = [str(entry.message) for entry in seen if entry.category is UserWarning]
    (sentence,) = [text for text in said if "memoryBudget" in text]
    assert sentence.startswith("memoryBudget 4.0 GiB could not be checked: model Branches does not run")


@pytest.mark.parametrize(
    ("changes", "counts"),
    [
        ({"checkpoint_every_steps": 1}, True),
        ({"checkpoint_every_epochs": 1}, True),
        ({"checkpoint_every_seconds": 600.0}, True),
        ({}, False),
        ({"checkpoint_every_steps": 1, "use_gpu": True}, False),
    ],
)
@pytest.mark.parametrize(("workers", "share"), [({}, 1.0), ({"num_workers": 2, "sync": Zero(stage=1)}, 0.5)])
def test_the_copy_for_a_checkpoint_counts_if_checkpoints_are_on(
    make_shards: Callable[..., ShardManifest],
    changes: dict[str, Any],
    counts: bool,
    workers: dict[str, Any],
    share: float,
) -> None:
    """The budget lies between the memory of a step and this memory with the copy."""
    manifest = make_shards({"x": np.zeros((64, 2), np.float32), "y": np.zeros(64, np.float32)})
    base = {"model": WIDE.to_json(), "collective": "torch", "checkpoint_every_seconds": 0.0, **workers}
    config, objects = config_of(manifest, Path("run"), **base), UserObjects()
    plan = Planner(config, objects, *shard_columns(config, manifest, config.most_rows)).plan()
    weights = sum(parameter.nbytes for parameter in WIDE.build().parameters())
    assert plan.checkpoint == pytest.approx(3 * weights * share, rel=0.2)
    budget = plan.peak + plan.checkpoint // 2
    check_budget(config, objects, manifest, budget)
    if counts:
        with pytest.raises(ValueError, match="memoryBudget is"):
            check_budget(replace(config, **changes), objects, manifest, budget)
    else:
        check_budget(replace(config, **changes), objects, manifest, budget)
