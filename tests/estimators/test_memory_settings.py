"""Settings for precision and memory reach the ranks and survive a save."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from spark_tables import points, quiet

from ringspark.estimators import TorchRegressor, Zero
from ringspark.models import ModelSpec
from ringspark.pipelines import write_shards

SPEC = ModelSpec("mlp", {"in_features": 4, "hidden": [32, 32, 32], "out_features": 1, "dropout": 0.1})
SETTINGS: dict[str, Any] = {
    "gradientCheckpointing": ["trunk.0", "trunk.1"],
    "gradientAccumulation": 2,
    "activationOffload": "disk",
    "activationCompression": "bits",
    "sync": Zero(stage=2),
    "memoryBudget": "1g",
}


def regressor(folder: Path, **settings: Any) -> TorchRegressor:
    common = {"model": SPEC, "batchSize": 32, "learningRate": 0.01, "epochs": 2, "numWorkers": 2}
    return quiet(TorchRegressor, folder / "storage", **common, **settings)


@pytest.fixture(scope="module")
def frame(spark):
    return points(spark, 200, 4).select("features", "label")


@pytest.mark.extras
@pytest.mark.spark
@pytest.mark.parametrize("collective", [pytest.param("horovod", marks=pytest.mark.slow), "torch"])
def test_exact_settings_together_train_the_network_that_none_of_them_does(frame, tmp_path, collective):
    # Written once, because two writes may order the rows differently.
    uri = write_shards(frame, str(tmp_path / "shards")).uri
    plain = regressor(tmp_path, collective=collective, gradientAccumulation=2).fitOnShards(uri)
    lean = regressor(tmp_path, collective=collective, **SETTINGS).fitOnShards(uri)
    expected = plain.module().state_dict()
    for name, tensor in lean.module().state_dict().items():
        torch.testing.assert_close(tensor, expected[name], rtol=0, atol=1e-5)


@pytest.mark.spark
def test_settings_survive_a_save(spark, tmp_path):
    estimator = regressor(tmp_path, **SETTINGS)
    estimator.save(str(tmp_path / "estimator"))
    loaded = TorchRegressor.load(str(tmp_path / "estimator"))
    for name in SETTINGS:
        assert loaded.getOrDefault(name) == estimator.getOrDefault(name)
    assert loaded.getGradientCheckpointing() == ["trunk.0", "trunk.1"]
    assert loaded.getMemoryBudget() == 2**30
