"""Settings for precision and memory reach the ranks and survive a save."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from ringspark.estimators import AllReduce, TorchRegressor, Zero
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


def regressor(storage_uri: str, **settings: Any) -> TorchRegressor:
    return TorchRegressor(
        model=SPEC,
        batchSize=32,
        learningRate=0.01,
        epochs=2,
        numWorkers=2,
        storageUri=storage_uri,
        showProgress=False,
        **settings,
    )


@pytest.fixture
def storage_uri(tmp_path):
    return str(tmp_path / "storage")


@pytest.fixture(scope="module")
def frame(spark):
    rng = np.random.default_rng(0)
    rows = [([float(v) for v in x], float(x.sum())) for x in rng.normal(size=(200, 4))]
    return spark.createDataFrame(rows, "features array<float>, label float")


@pytest.mark.extras
@pytest.mark.spark
@pytest.mark.parametrize("collective", [pytest.param("horovod", marks=pytest.mark.slow), "torch"])
def test_exact_settings_together_train_the_network_that_none_of_them_does(
    frame, storage_uri, tmp_path, collective
):
    # Written once, because two writes may order the rows differently.
    uri = write_shards(frame, str(tmp_path / "shards")).uri
    plain = regressor(storage_uri, collective=collective, gradientAccumulation=2).fitOnShards(uri)
    lean = regressor(storage_uri, collective=collective, **SETTINGS).fitOnShards(uri)
    for (name, a), b in zip(
        plain.module().state_dict().items(), lean.module().state_dict().values(), strict=True
    ):
        np.testing.assert_allclose(a.numpy(), b.numpy(), atol=1e-5, err_msg=name)


@pytest.mark.spark
def test_sharded_parameters_come_back_whole(frame, storage_uri, tmp_path):
    uri = write_shards(frame, str(tmp_path / "shards")).uri
    plain, sharded = (
        regressor(storage_uri, collective="torch", sync=sync, precision="bf16").fitOnShards(uri)
        for sync in (AllReduce(), Zero(stage=3))
    )
    expected = plain.module().state_dict()
    for name, tensor in sharded.module().state_dict().items():
        torch.testing.assert_close(tensor, expected[name], rtol=0, atol=1e-5)
    rows = sharded.transform(frame).collect()
    with torch.no_grad():
        outputs = sharded.module()(torch.tensor([row.features for row in rows]))
    assert [row.prediction for row in rows] == pytest.approx(outputs[:, 0].tolist(), rel=1e-5, abs=1e-6)


@pytest.mark.spark
def test_settings_survive_a_save(spark, storage_uri, tmp_path):
    estimator = regressor(storage_uri, **SETTINGS)
    estimator.save(str(tmp_path / "estimator"))
    loaded = TorchRegressor.load(str(tmp_path / "estimator"))
    for name in SETTINGS:
        assert loaded.getOrDefault(name) == estimator.getOrDefault(name)
    assert loaded.getGradientCheckpointing() == ["trunk.0", "trunk.1"]
    assert loaded.getMemoryBudget() == 2**30


@pytest.mark.spark
@pytest.mark.parametrize(
    ("settings", "sentence"),
    [
        ({"gradientCheckpointing": ["trunk.9"]}, "did you mean 'trunk."),
        ({"gradientCheckpointing": 9}, "must be from 2 to 3"),
    ],
)
def test_what_cannot_be_is_refused_in_a_sentence(frame, storage_uri, settings, sentence):
    with pytest.raises(ValueError, match=sentence.replace("(", r"\(")):
        regressor(storage_uri, **settings).fit(frame)
