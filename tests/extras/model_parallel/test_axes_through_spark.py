"""Every axis of a mesh, every pipeline schedule and own optimizers train through Spark like one worker."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from pyspark.sql import functions as F

from ringspark.estimators import Mesh, Pipeline, TorchClassifier, Zero
from ringspark.models import ModelSpec

pytestmark = [pytest.mark.spark, pytest.mark.slow, pytest.mark.distributed]
TEXT = {"vocab_size": 23, "max_seq_len": 12, "dim": 16, "depth": 4, "num_heads": 4, "out_features": 3}
EXPERTS = {"num_experts": 4, "router": "gshard", "every": 2, "min_capacity": 1, "balance_weight": 0.2}
SPECS = {
    "text": ModelSpec("transformer_classifier", {**TEXT, "padding_id": 0}),
    "experts": ModelSpec("transformer_classifier", {**TEXT, "padding_id": 0, "experts": EXPERTS}),
}
ROWS = 110  # the last batch has 10 rows


@pytest.fixture(scope="module")
def train(spark: Any, tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Any]:
    """Returns a function that fits the network `name` and returns the model."""
    word = [(F.col("id") * (3 + 2 * place) + place) % 22 + 1 for place in range(11)]
    table = spark.range(0, ROWS, 1, 3).select(
        F.array(*word).alias("features"), (F.col("id") % 3).alias("label")
    )
    table.cache().count()
    folder = tmp_path_factory.mktemp("runs")

    def fit(name: str = "text", **settings: Any) -> Any:
        given = {"epochs": 3, "batchSize": 20, "seed": 1}
        if not callable(settings.get("optimizer")):
            given |= {"optimizer": "momentum", "learningRate": 0.05}
        estimator = TorchClassifier(model=SPECS[name], storageUri=str(folder), showProgress=False)
        return estimator.setParams(collective="torch", **given | settings).fit(table)

    return fit


@pytest.fixture(scope="module")
def one(train: Callable[..., Any]) -> dict[str, Any]:
    """The models of one worker, by network."""
    return {name: train(name) for name in SPECS}


def difference(first: Any, second: Any) -> float:
    weights = [
        torch.cat([p.detach().flatten() for p in model.module().parameters()]) for model in (first, second)
    ]
    return float((weights[0] - weights[1]).abs().max())


MESHES: dict[str, dict[str, Any]] = {
    "tensor": {"parallelism": Mesh(tensor=2)},
    "sequence": {"parallelism": Mesh(sequence=2)},
    "sequence-ulysses": {"parallelism": Mesh(sequence=2, context="ulysses")},
    "data-sequence": {"parallelism": Mesh(data=2, sequence=2)},
    "shard-zero1": {"parallelism": Mesh(shard=2), "sync": Zero(stage=1)},
    "shard-zero2": {"parallelism": Mesh(shard=2), "sync": Zero(stage=2)},
    "shard-zero3": {"parallelism": Mesh(shard=2), "sync": Zero(stage=3)},
    "data-shard": {"parallelism": Mesh(data=2, shard=2), "sync": Zero(stage=3)},
    "shard-sequence": {"parallelism": Mesh(shard=2, sequence=2), "sync": Zero(stage=3)},
    "shard-pipeline": {"parallelism": Mesh(shard=2, pipeline=Pipeline(2)), "sync": Zero(stage=1)},
    **{
        schedule: {"parallelism": Mesh(pipeline=Pipeline(2, schedule=schedule)), "gradientAccumulation": 2}
        for schedule in ("naive", "gpipe", "1f1b", "zero_bubble")
    },
    **{
        schedule: {
            "parallelism": Mesh(pipeline=Pipeline(2, schedule=schedule, virtual=2)),
            "gradientAccumulation": 4,
        }
        for schedule in ("interleaved", "zbv")
    },
}


@pytest.mark.parametrize("name", MESHES)
def test_a_mesh_fits_like_one_worker(train: Callable[..., Any], one: dict[str, Any], name: str) -> None:
    settings = MESHES[name]
    axes = ("data", "shard", "sequence", "tensor", "pipeline")
    mesh = settings["parallelism"]
    workers = 1
    for axis in axes:
        workers *= mesh.size(axis)
    many = train(numWorkers=workers, **settings)
    assert difference(many, one["text"]) < 1e-5
    assert [*many.summary.history.train_loss] == pytest.approx(
        [*one["text"].summary.history.train_loss], rel=1e-5
    )


def test_experts_on_several_workers_fit_like_one_worker(
    train: Callable[..., Any], one: dict[str, Any]
) -> None:
    many = train("experts", numWorkers=2, parallelism=Mesh(expert=2))
    assert difference(many, one["experts"]) < 1e-5


@pytest.mark.extras
@pytest.mark.parametrize("schedule", ["pipedream", "2bw"])
def test_a_schedule_with_delayed_gradients_learns(train: Callable[..., Any], schedule: str) -> None:
    mesh = Mesh(pipeline=Pipeline(2, schedule=schedule))
    many = train(numWorkers=2, parallelism=mesh, gradientAccumulation=2, learningRate=0.01, epochs=6)
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


@pytest.mark.parametrize(
    ("workers", "settings"),
    [
        (1, {}),
        (2, {}),
        (2, {"sync": Zero(stage=1)}),
        (2, {"sync": Zero(stage=3)}),
        (2, {"parallelism": Mesh(tensor=2)}),
        (2, {"parallelism": Mesh(sequence=2)}),
        (2, {"parallelism": Mesh(pipeline=Pipeline(2)), "gradientAccumulation": 2}),
    ],
    ids=repr,
)
def test_an_optimizer_of_a_users_own_fits_like_the_named_one(
    train: Callable[..., Any], one: dict[str, Any], workers: int, settings: dict[str, Any]
) -> None:
    assert difference(train(optimizer=own_momentum(), numWorkers=workers, **settings), one["text"]) < 1e-5


def test_an_own_optimizer_of_whole_parameters_is_refused_where_they_are_sharded(
    train: Callable[..., Any],
) -> None:
    """It fits where workers hold whole parameters."""

    class Whole(torch.optim.SGD):
        pass

    def make(parameters: Any) -> torch.optim.Optimizer:
        return Whole(parameters, lr=0.05)

    with pytest.raises(ValueError, match="only shards of parameters, but optimizer Whole needs whole"):
        train(optimizer=make, numWorkers=2, parallelism=Mesh(tensor=2))
    spread = train(optimizer=make, numWorkers=2, parallelism=Mesh(sequence=2))
    assert difference(spread, train(optimizer="sgd")) < 1e-5
