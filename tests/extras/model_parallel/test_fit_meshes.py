"""`fit` over data x tensor on Spark, with settings that change what the workers send or train."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from ringspark.estimators import AllReduce, LoRA, Mesh, PowerSGD, TopK, TorchRegressor
from ringspark.models import ModelSpec

MASTER = os.environ.get("RINGSPARK_TEST_MASTER", "local[4]")
pytestmark = [
    pytest.mark.spark,
    pytest.mark.distributed,
    pytest.mark.slow,
    pytest.mark.filterwarnings("ignore:`torch.jit.script:DeprecationWarning"),
    pytest.mark.skipif(not MASTER.startswith("local["), reason="needs four slots"),
]
SPEC = ModelSpec("mlp", {"in_features": 3, "hidden": [24, 16], "out_features": 1, "activation": "tanh"})
# Settings, and whether the training is the training of one worker.
FITS: dict[str, tuple[dict[str, Any], bool]] = {
    "adapters": ({"lora": LoRA(rank=2, targets=("trunk.*",), train=("head.*",))}, True),
    "compiled": ({"compile": True}, True),
    "compressed, everything sent": ({"sync": AllReduce(compression=TopK(ratio=1.0, least=1))}, True),
    "compressed": ({"sync": AllReduce(compression=PowerSGD(rank=1, least=1))}, False),
    "may shrink": ({"minWorkers": 2}, True),
}


@pytest.fixture(scope="module")
def table(spark: Any) -> Any:
    x = np.random.default_rng(3).normal(size=(200, 3))
    rows = [(i, [float(v) for v in row], float(row.sum())) for i, row in enumerate(x)]
    return spark.createDataFrame(rows, "id long, features array<double>, label double").repartition(3).cache()


@pytest.mark.parametrize("name", FITS)
def test_a_fit_over_replicas_of_sharded_layers(table: Any, tmp_path: Path, name: str) -> None:
    changes, is_equal = FITS[name]
    common: dict[str, Any] = {
        "model": SPEC,
        "optimizer": "momentum",
        "learningRate": 0.02,
        "epochs": 4,
        "batchSize": 32,
        "collective": "torch",
        "storageUri": str(tmp_path),
        "showProgress": False,
    }
    many = TorchRegressor(**common, **changes, numWorkers=4, parallelism=Mesh(data=2, tensor=2)).fit(table)
    losses = many.summary.history["train_loss"]
    assert losses.iloc[-1] < 0.7 * losses.iloc[0]
    found = [row.prediction for row in many.transform(table).orderBy("id").collect()]
    many.write().overwrite().save(str(tmp_path / "saved"))
    loaded = type(many).load(str(tmp_path / "saved"))
    assert [row.prediction for row in loaded.transform(table).orderBy("id").collect()] == found
    if name == "adapters":
        assert loaded.adapter().keys() == many.adapter().keys() >= {"trunk.0.linear.lora_A", "head.weight"}
    if is_equal:
        adapters = {key: value for key, value in changes.items() if key == "lora"}
        alone = TorchRegressor(**common, **adapters).fit(table)
        expected = [row.prediction for row in alone.transform(table).orderBy("id").collect()]
        np.testing.assert_allclose(found, expected, rtol=0, atol=1e-5)
