"""`inferenceOffload="disk"`: a worker with too little memory for all weights predicts correctly."""

import json
import os
import sys
from typing import Any

import numpy as np
import pytest
import torch
from programs import run_program, spark_free_environment
from ready_models import ready_model
from small_networks import Net
from spark_tables import values_of
from torch import nn

from ringspark.estimators import TorchModel, TorchRegressionModel
from ringspark.estimators.training.checkpoint import streamed_file
from ringspark.estimators.training.checkpoint.weights import save_checkpoint
from ringspark.models import ModelSpec
from ringspark.models.meta_device import build_on_meta, fill

pytestmark = pytest.mark.spark

NETWORK = ModelSpec("mlp", {"in_features": 2, "hidden": [256, 256], "out_features": 1})


@pytest.fixture
def model(tmp_path):
    return ready_model(TorchRegressionModel, NETWORK, tmp_path / "checkpoint")


@pytest.fixture
def rows(spark):
    return spark.range(40).selectExpr("id", "array(id / 40, id % 7) as features")


def predictions(model: Any, rows: Any) -> list[float]:
    return values_of(model.transform(rows))


@pytest.mark.extras
def test_predictions_are_the_same_and_the_setting_is_saved(model, rows, tmp_path):
    expected = predictions(model, rows)
    model.setInferenceOffload("disk").write().save(str(tmp_path / "model"))
    loaded = TorchRegressionModel.load(str(tmp_path / "model"))
    assert loaded.getInferenceOffload() == "disk"
    assert predictions(loaded, rows) == expected
    features = [[i / 40, i % 7] for i in range(40)]
    assert [loaded.predict(np.array(row)) for row in features] == pytest.approx(expected, rel=1e-5)


@pytest.mark.extras
def test_the_driver_maps_one_tensor_at_a_time_too(model):
    model.setInferenceOffload("disk").predict(np.array([0.5, 1.0]))
    module = model._predictor().load()
    state = {name: tensor.numel() * 4 for name, tensor in module.state_dict().items()}
    names = [name for name, size in state.items() if size > streamed_file.KEPT_BYTES]
    assert names
    for name in names:
        path, _, own = name.rpartition(".")
        owner = module.get_submodule(path)
        assert getattr(owner, own) is not getattr(owner, own)


@pytest.mark.extras
def test_a_weight_beside_the_parameters_is_one_sentence(tmp_path):
    """The network keeps its weights in an extra list, and computes with the list."""
    wide = nn.Parameter(torch.zeros(2, 20_000))
    listed = Net(lambda self, x: x @ self.all[0], wide=wide, all=[wide])
    model = ready_model(TorchModel, listed, tmp_path, [(20_000,)], inferenceOffload="disk")
    predictor = model._predictor()
    with pytest.raises(ValueError, match="took from a list or variable"):
        predictor.predict(predictor.load(), [np.ones((1, 2), np.float32)])


LIMITED = """
import json, sys
from pyspark.sql import SparkSession
from ringspark.estimators import TorchRegressionModel
builder = SparkSession.builder.master("local[1]").config("spark.ui.enabled", "false")
spark = builder.config("spark.executor.pyspark.memory", "1300m").getOrCreate()
spark.sparkContext.setLogLevel("OFF")
rows = spark.range(0, 3, 1, 1).selectExpr("id", "array(id / 3, id) as features")
model = TorchRegressionModel.load(sys.argv[1])
found = {}
for offload in ("disk", "none"):
    result = model.setInferenceOffload(offload).transform(rows)
    try:
        found[offload] = [row.prediction for row in result.orderBy("id").collect()]
    except Exception as error:
        found[offload] = str(error)
print(json.dumps(found))
"""


@pytest.mark.slow
def test_a_worker_that_cannot_have_all_weights_predicts_with_them(tmp_path):
    """`spark.executor.pyspark.memory` limits the worker's address space (RLIMIT_AS), including libraries."""
    spec = ModelSpec("mlp", {"in_features": 2, "hidden": [4096] * 13, "out_features": 1})
    network = build_on_meta(spec.build)
    torch.manual_seed(0)
    # Expanded tensors take no memory here, but are written in full.
    shapes = {name: tensor.shape for name, tensor in network.state_dict().items()}
    fill(network, {name: torch.randn(shape[-1]).mul_(0.02).expand(shape) for name, shape in shapes.items()})
    save_checkpoint(str(tmp_path / "checkpoint"), network)
    model = TorchRegressionModel(model=spec)._set_trained(str(tmp_path / "checkpoint"), [(1,)], None)
    folder = str(tmp_path / "model")
    model.write().save(folder)
    # Libraries take some 830 MiB of address space.
    assert os.path.getsize(tmp_path / "model" / "weights" / "model.safetensors") > 768 << 20
    predictor = model._predictor()
    rows = np.array([[i / 3, i] for i in range(3)], np.float32)
    expected = predictor.predict(predictor.load(), [rows])[:, 0]
    environment = spark_free_environment() | {"PYSPARK_PYTHON": sys.executable, "OMP_NUM_THREADS": "1"}
    found = json.loads(run_program(LIMITED, folder, env=environment).stdout.splitlines()[-1])
    assert found["disk"] == pytest.approx(expected.tolist(), rel=1e-5)
    assert "inferenceOffload='disk'" in found["none"], found["none"]
