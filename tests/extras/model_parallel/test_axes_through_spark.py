"""Every axis of a mesh and own optimizers train through Spark like one worker."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from parity import assert_equal_weights, assert_predicts_the_same
from pyspark.sql import functions as F
from small_training import workers_of
from spark_tables import on_this_host, points, values_of

from ringspark.estimators import (
    AllReduce,
    LoRA,
    Mesh,
    Pipeline,
    PowerSGD,
    TopK,
    TorchClassifier,
    TorchRegressor,
    Zero,
)
from ringspark.models import ModelSpec

pytestmark = [pytest.mark.spark, pytest.mark.slow, pytest.mark.distributed]
TEXT = {"vocab_size": 23, "max_seq_len": 12, "dim": 16, "depth": 4, "num_heads": 4, "out_features": 3}
SPEC = ModelSpec("transformer_classifier", {**TEXT, "padding_id": 0})
ROWS = 110  # the last batch has 10 rows


@pytest.fixture(scope="module")
def train(spark: Any, tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Any]:
    word = [(F.col("id") * (3 + 2 * place) + place) % 22 + 1 for place in range(11)]
    table = spark.range(0, ROWS, 1, 3).select(
        F.array(*word).alias("features"), (F.col("id") % 3).alias("label")
    )
    table.cache().count()
    folder = tmp_path_factory.mktemp("runs")

    def fit(**settings: Any) -> Any:
        given = {"epochs": 3, "batchSize": 20, "seed": 1}
        if not callable(settings.get("optimizer")):
            given |= {"optimizer": "momentum", "learningRate": 0.05}
        estimator = TorchClassifier(model=SPEC, storageUri=str(folder), showProgress=False)
        return estimator.setParams(collective="torch", **given | settings).fit(table)

    return fit


def piped(schedule: str, virtual: int = 1) -> dict[str, Any]:
    pipeline = Pipeline(2, schedule=schedule, virtual=virtual)
    return {"parallelism": Mesh(pipeline=pipeline), "gradientAccumulation": 2 * virtual}


MESHES: dict[str, dict[str, Any]] = {
    "data": {"parallelism": Mesh(data=2)},
    "tensor": {"parallelism": Mesh(tensor=2)},
    "sequence": {"parallelism": Mesh(sequence=2)},
    "data-shard": {"parallelism": Mesh(data=2, shard=2), "sync": Zero(stage=3)},
    "shard-sequence": {"parallelism": Mesh(shard=2, sequence=2), "sync": Zero(stage=3)},
    "shard-pipeline": {"parallelism": Mesh(shard=2, pipeline=Pipeline(2)), "sync": Zero(stage=1)},
    "1f1b": piped("1f1b"),
    "zbv": piped("zbv", virtual=2),
}


@pytest.fixture(scope="module")
def one(train: Callable[..., Any]) -> Any:
    return train()


@pytest.mark.parametrize("schedule", ["pipedream", "2bw"])
def test_a_schedule_with_delayed_gradients_learns(train: Callable[..., Any], schedule: str) -> None:
    many = train(numWorkers=2, learningRate=0.01, epochs=6, **piped(schedule))
    losses = [*many.summary.history.train_loss]
    assert losses[-1] < losses[0]


def own_momentum() -> Callable[[Any], torch.optim.Optimizer]:
    """Returns an optimizer class that no worker can import: SGD with momentum, written out."""

    class Heavy(torch.optim.Optimizer):
        is_elementwise = True

        def __init__(self, parameters: Any, lr: float) -> None:
            super().__init__(parameters, {"lr": lr})

        @torch.no_grad()
        def step(self, closure: Any = None) -> None:
            for group in self.param_groups:
                for parameter in group["params"]:
                    if parameter.grad is None:
                        continue
                    speed = self.state[parameter].setdefault("speed", torch.zeros_like(parameter))
                    speed.mul_(0.9).add_(parameter.grad)
                    parameter.sub_(group["lr"] * speed)

    return lambda parameters: Heavy(parameters, lr=0.05)


@pytest.mark.parametrize("name", MESHES)
def test_a_mesh_and_an_own_optimizer_fit_like_one_worker(train: Any, one: Any, name: str) -> None:
    workers = workers_of(MESHES[name]["parallelism"])
    many = train(optimizer=own_momentum(), numWorkers=workers, **MESHES[name])
    assert_equal_weights(many, one, 1e-5)
    losses = [[*model.summary.history.train_loss] for model in (many, one)]
    assert losses[0] == pytest.approx(losses[1], rel=1e-5)


MLP = ModelSpec("mlp", {"in_features": 3, "hidden": [24, 16], "out_features": 1, "activation": "tanh"})
# Settings, and whether the training is the training of one worker.
FITS: dict[str, tuple[dict[str, Any], bool]] = {
    "adapters": ({"lora": LoRA(rank=2, targets=("trunk.*",), train=("head.*",))}, True),
    "compiled": ({"compile": True}, True),
    "compressed, everything sent": ({"sync": AllReduce(compression=TopK(ratio=1.0, least=1))}, True),
    "compressed": ({"sync": AllReduce(compression=PowerSGD(rank=1, least=1))}, False),
    "may shrink": ({"minWorkers": 2}, True),
}


@pytest.mark.filterwarnings("ignore:`torch.jit.script:DeprecationWarning")
@on_this_host
@pytest.mark.parametrize("name", FITS)
def test_a_fit_over_replicas_of_sharded_layers(spark: Any, tmp_path: Path, name: str) -> None:
    """The settings change what the workers send or train."""
    table = points(spark, 200)
    changes, is_equal = FITS[name]
    common: dict[str, Any] = {"model": MLP, "optimizer": "momentum", "learningRate": 0.02, "epochs": 4}
    common |= {"batchSize": 32, "collective": "torch", "storageUri": str(tmp_path), "showProgress": False}
    many = TorchRegressor(**common, **changes, numWorkers=4, parallelism=Mesh(data=2, tensor=2)).fit(table)
    losses = many.summary.history["train_loss"]
    assert losses.iloc[-1] < 0.7 * losses.iloc[0]
    many.write().overwrite().save(str(tmp_path / "saved"))
    loaded = type(many).load(str(tmp_path / "saved"))
    assert_predicts_the_same(many, loaded, table)
    if name == "adapters":
        assert loaded.adapter().keys() == many.adapter().keys() >= {"trunk.0.linear.lora_A", "head.weight"}
    if is_equal:
        adapters = {key: value for key, value in changes.items() if key == "lora"}
        models = (many, TorchRegressor(**common, **adapters).fit(table))
        found = (values_of(m.transform(table)) for m in models)
        np.testing.assert_allclose(*found, rtol=0, atol=1e-5)
