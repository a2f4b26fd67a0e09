"""A large user-defined network: its weights travel through the store, so Spark's closure stays small."""

from pathlib import Path
from typing import Any

import pytest
import torch
from spark_tables import quiet
from torch import nn

from ringspark.estimators import TorchModel, TorchRegressor
from ringspark.estimators.launch import train_task
from ringspark.estimators.launch.train_task import PackedObjects
from ringspark.estimators.training.settings.config import UserObjects

pytestmark = pytest.mark.spark


class Wide(nn.Module):
    """A linear layer with unused large weights and a non-persistent buffer."""

    def __init__(self, ballast_bytes: int) -> None:
        super().__init__()
        self.line = nn.Linear(2, 1)
        self.ballast = nn.Parameter(torch.randn(ballast_bytes // 4))
        self.register_buffer("scale", torch.tensor(2.0), persistent=False)

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        return self.line(rows) * self.scale + self.ballast[:1]


def _fit(spark: Any, folder: Path, network: nn.Module, **settings: Any) -> TorchModel:
    frame = spark.range(0, 64, 1, 2).selectExpr("array(id / 64, 1.0) as features", "id / 32 as label")
    common = {"model": network, "batchSize": 16, "optimizer": "sgd", "epochs": 2, "numWorkers": 2}
    return quiet(TorchRegressor, folder, **common | settings).fit(frame)


@pytest.mark.modes
def test_weights_by_the_store_train_as_those_in_the_closure(spark, tmp_path, monkeypatch):
    torch.manual_seed(0)
    network = Wide(2 << 20)
    assert len(PackedObjects.of(UserObjects(module=network)).pickled) < 50_000
    by_store = _fit(spark, tmp_path / "store", network).module().state_dict()
    (run,) = (tmp_path / "store").glob("run-*")
    assert not (run / "first-weights").exists()
    monkeypatch.setattr(train_task, "CLOSURE_BYTES", 1 << 40)
    in_closure = _fit(spark, tmp_path / "closure", network).module().state_dict()
    assert all(tensor.equal(in_closure[name]) for name, tensor in by_store.items())
    assert not by_store["line.weight"].equal(network.line.weight)


def _transposed() -> nn.Module:
    module = nn.Linear(1024, 1024)
    module.weight = nn.Parameter(module.weight.detach().t())
    return module


def _seen_elsewhere() -> nn.Module:
    module = nn.Linear(1024, 1024)
    module.same = module.weight.data
    return module


def _sharing() -> nn.Module:
    first, second = nn.Linear(1024, 1024), nn.Linear(1024, 1024)
    second.weight.data = first.weight.data
    return nn.Sequential(first, second)


@pytest.mark.parametrize(
    "make", [_transposed, _sharing, _seen_elsewhere, lambda: nn.LazyLinear(4), lambda: nn.Linear(4, 4)]
)
def test_what_a_file_would_not_give_back_or_is_small_travels_whole(make):
    assert PackedObjects.of(UserObjects(module=make())).network is None


@pytest.mark.slow
@pytest.mark.modes
def test_a_network_of_a_gigabyte_trains(spark, tmp_path):
    """This also holds on Connect, which limits messages to 128 MiB."""
    network = Wide(1 << 30)
    model = _fit(spark, tmp_path, network, epochs=1, numWorkers=1)
    assert model.summary.rows == 64
    assert not model.module().line.weight.equal(network.line.weight)
    frame = spark.range(4).selectExpr("array(id / 64, 1.0) as features")
    assert model.transform(frame).count() == 4
