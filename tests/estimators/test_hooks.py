"""User-defined metrics, transforms, readers and collectives in the stages."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from pyspark.ml import Pipeline, PipelineModel
from pyspark.sql import functions as F
from torch import nn

from ringspark.estimators import TorchClassifier, TorchEstimator, TorchRegressor
from ringspark.models import ModelSpec

pytestmark = pytest.mark.spark
torchmetrics = pytest.importorskip("torchmetrics")


@pytest.fixture(scope="module")
def table(spark):
    """300 rows in two partitions; a third are held out."""
    return spark.range(0, 300, 1, 2).selectExpr(
        "id",
        "array(cast(sin(id) as float), cast(cos(1.7 * id) as float)) as features",
        "id % 3 = 0 as held",
        "cast(sin(id) + cos(1.7 * id) / 3 > 0 as int) as label",
        "sin(id) - 3 * cos(1.7 * id) as target",
    )


def common(tmp_path: Path, **changes: Any) -> dict[str, Any]:
    return {
        "epochs": 2,
        "batchSize": 32,
        "learningRate": 0.05,
        "validationIndicatorCol": "held",
        "storageUri": str(tmp_path),
        "showProgress": False,
    } | changes


def network(outputs: int) -> ModelSpec:
    return ModelSpec("mlp", {"in_features": 2, "hidden": [8], "out_features": outputs})


def hit(outputs: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    return (outputs.argmax(1) == labels).float()


def gini(outputs: torch.Tensor, labels: torch.Tensor) -> float:
    """Gini coefficient over all pairs of a class-1 row and a class-0 row."""
    score = outputs[:, 1] - outputs[:, 0]
    return float((score[labels == 1][:, None] - score[labels == 0]).sign().mean())


gini.higher_is_better = True  # type: ignore[attr-defined]


@pytest.mark.modes
@pytest.mark.parametrize(
    "collective", ["local", *(pytest.param(name, marks=pytest.mark.slow) for name in ("torch", "horovod"))]
)
def test_metrics_of_ones_own_are_equal_for_any_number_of_workers(table, tmp_path, collective):
    own = [
        torchmetrics.classification.BinaryAUROC(),
        torchmetrics.classification.MulticlassF1Score(num_classes=2),
        hit,
        gini,
        "auroc",
        "accuracy",
    ]
    names = ["BinaryAUROC", "MulticlassF1Score", "hit", "gini", "auroc", "accuracy"]
    models = [
        TorchClassifier(
            **common(tmp_path, numWorkers=workers, collective=collective),
            model=network(2),
            metrics=own,
            monitor="gini",
            keep="best",
        ).fit(table)
        for workers in ((1,) if collective == "local" else (1, 2))
    ]
    one, two = (model.summary.epochs for model in (models[0], models[-1]))
    for epoch in range(2):
        told = one[epoch].metrics
        assert list(told) == [f"{split}_{name}" for split in ("train", "validation") for name in names]
        assert two[epoch].metrics == pytest.approx(told, rel=1e-4)
        for split in ("train", "validation"):
            assert told[f"{split}_hit"] == pytest.approx(told[f"{split}_accuracy"])
            assert told[f"{split}_BinaryAUROC"] == pytest.approx(told[f"{split}_auroc"], rel=1e-6)
            assert told[f"{split}_gini"] == pytest.approx(2 * told[f"{split}_auroc"] - 1, rel=1e-6)
    best = max(one, key=lambda record: record.metrics["validation_gini"])
    evaluated = models[0].evaluate(table.where("held"))
    assert evaluated == pytest.approx({n: best.metrics[f"validation_{n}"] for n in names}, rel=1e-5)


class Squared(nn.Module):
    """Can be loaded only where its class is importable."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.cat([x, x**2], 1)


class Own(nn.Module):
    """A user-defined class, saved as a program whose inputs the transform has prepared."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.linear(x)  # type: ignore[no-any-return]


def shaken(x: torch.Tensor) -> torch.Tensor:
    return torch.cat([x, x**2], 1) + 0.01 * torch.randn(len(x), 4)


@pytest.mark.slow
@pytest.mark.modes
def test_a_model_prepares_its_inputs_alike_wherever_it_predicts(table, tmp_path):
    estimator = TorchRegressor(
        **common(tmp_path, labelCol="target", metrics=["mse"]),
        model=ModelSpec("linear", {"in_features": 4, "out_features": 1}),
        transformBatch=shaken,
        transformInPrediction=Squared(),
    )
    regressor = estimator.fit(table)
    held = table.where("held")
    scored = regressor.transform(held).select("features", "prediction").collect()
    features = torch.tensor([row["features"] for row in scored])
    with torch.no_grad():
        expected = regressor.module()(Squared()(features))[:, 0].tolist()
    assert [row["prediction"] for row in scored] == pytest.approx(expected, rel=1e-5)
    assert regressor.predict(scored[3]["features"]) == pytest.approx(expected[3], rel=1e-5)
    told = regressor.summary.epochs[-1].metrics["validation_mse"]
    assert regressor.evaluate(held)["mse"] == pytest.approx(told, rel=1e-5)


@pytest.mark.modes
@pytest.mark.slow
def test_a_model_and_its_preparation_of_one_s_own_predict_the_same_after_load(table, tmp_path, monkeypatch):
    estimator = TorchRegressor(
        **common(tmp_path, labelCol="target"),
        model=Own(),
        transformBatch=shaken,
        transformInPrediction=Squared(),
    )
    fitted = Pipeline(stages=[estimator]).fit(table)
    held = table.where("held")
    scored = fitted.transform(held).select("prediction").collect()
    fitted.save(str(tmp_path / "saved"))
    monkeypatch.setenv("RINGSPARK_ALLOW_PICKLE", "1")
    loaded = PipelineModel.load(str(tmp_path / "saved"))
    again = [row["prediction"] for row in loaded.transform(held).select("prediction").collect()]
    assert again == [row["prediction"] for row in scored]


@pytest.mark.slow
def test_an_export_prepares_its_inputs_too(table, tmp_path):
    model = TorchRegressor(
        **common(tmp_path, labelCol="target", epochs=1),
        model=ModelSpec("linear", {"in_features": 4, "out_features": 1}),
        transformBatch=Squared(),
        transformInPrediction=Squared(),
    ).fit(table)
    model.export(str(tmp_path / "model.pt2"))
    features = torch.randn(5, 2)
    exported = torch.export.load(tmp_path / "model.pt2").module()
    assert exported(features).equal(model.module()(Squared()(features)))


def test_a_transform_of_torch_s_own_layers_is_saved_without_pickle(table, tmp_path):
    prepare = nn.Sequential(nn.BatchNorm1d(2), nn.Flatten())
    prepare[0].running_mean.copy_(torch.tensor([0.5, -2.0]))
    estimator = TorchRegressor(
        **common(tmp_path, labelCol="target", epochs=1),
        model=network(1),
        transformBatch=nn.Dropout(0.1),
        transformInPrediction=prepare,
    )
    estimator.save(str(tmp_path / "estimator"))
    model = TorchRegressor.load(str(tmp_path / "estimator")).fit(table)
    model.save(str(tmp_path / "model"))
    assert not list((tmp_path / "model").rglob("objects.pkl"))
    loaded = type(model).load(str(tmp_path / "model"))
    kept = loaded.getTransformInPrediction()[0].running_mean
    assert kept.tolist() == [0.5, -2.0]
    rows = [m.transform(table.limit(20)).select("prediction").collect() for m in (model, loaded)]
    assert rows[0] == rows[1]


def test_each_label_has_the_metrics_that_suit_it(table, tmp_path):
    class TwoHeads(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.kind, self.size = nn.Linear(2, 2), nn.Linear(2, 1)

        def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
            return self.kind(x), self.size(x)

    model = TorchEstimator(
        **common(tmp_path, epochs=1),
        model=TwoHeads(),
        labelCols=["label", "target"],
        loss=["cross_entropy", "mse"],
        predictionCols=["kind", "size"],
        metrics=[
            torchmetrics.classification.BinaryF1Score(),
            torchmetrics.MeanAbsoluteError,
            {
                "finite": lambda outputs, labels: (
                    outputs.flatten(1 - 2).reshape(len(labels), -1).isfinite().all(1)
                )
            },
            "mae",
        ],
    ).fit(table.withColumn("target", F.col("target").cast("float")))
    told = model.summary.epochs[0].metrics
    entries = [
        "BinaryF1Score_label",
        "finite_label",
        "MeanAbsoluteError_target",
        "finite_target",
        "mae_target",
    ]
    assert [name for name in told if "loss" not in name and name.startswith("validation")] == [
        f"validation_{name}" for name in entries
    ]
    assert told["train_MeanAbsoluteError_target"] == pytest.approx(told["train_mae_target"], rel=1e-5)
    assert told["train_finite_label"] == told["train_finite_target"] == 1.0
