"""User-defined metrics, transforms, readers and collectives in the stages."""

from pathlib import Path
from typing import Any

import pytest
import torch
from pyspark.ml import Pipeline, PipelineModel
from pyspark.sql import functions as F
from small_networks import linear, mlp, outputs_of, two_heads
from spark_tables import quiet, values_of
from torch import nn

from ringspark.estimators import TorchClassifier, TorchEstimator, TorchRegressor

pytestmark = pytest.mark.spark
torchmetrics = pytest.importorskip("torchmetrics")


@pytest.fixture(scope="module")
def table(spark):
    return spark.range(0, 300, 1, 2).selectExpr(
        "id",
        "array(cast(sin(id) as float), cast(cos(1.7 * id) as float)) as features",
        "id % 3 = 0 as held",
        "cast(sin(id) + cos(1.7 * id) / 3 > 0 as int) as label",
        "sin(id) - 3 * cos(1.7 * id) as target",
    )


def stage(folder: Path, kind: Any = TorchRegressor, **changes: Any) -> Any:
    settings = {"epochs": 2, "batchSize": 32, "learningRate": 0.05, "validationIndicatorCol": "held"}
    if kind is TorchRegressor:
        settings["labelCol"] = "target"
    return quiet(kind, folder, **settings | changes)


def hit(outputs: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    return (outputs.argmax(1) == labels).float()


def gini(outputs: torch.Tensor, labels: torch.Tensor) -> float:
    """Gini coefficient over all pairs of a class-1 row and a class-0 row."""
    score = outputs[:, 1] - outputs[:, 0]
    return float((score[labels == 1][:, None] - score[labels == 0]).sign().mean())


gini.higher_is_better = True


@pytest.mark.modes
@pytest.mark.parametrize(
    "collective", ["local", *(pytest.param(name, marks=pytest.mark.slow) for name in ("torch", "horovod"))]
)
def test_metrics_of_ones_own_are_equal_for_any_number_of_workers(table, tmp_path, collective):
    metrics = torchmetrics.classification
    own = [metrics.BinaryAUROC(), metrics.MulticlassF1Score(num_classes=2), hit, gini, "auroc", "accuracy"]
    names = ["BinaryAUROC", "MulticlassF1Score", "hit", "gini", "auroc", "accuracy"]
    settings = {"model": mlp(2), "metrics": own, "monitor": "gini", "keep": "best", "collective": collective}
    models = [
        stage(tmp_path, TorchClassifier, numWorkers=workers, **settings).fit(table)
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


class Own(nn.Linear):
    """A user-defined class, saved as a program whose inputs the transform has prepared."""


def shaken(x: torch.Tensor) -> torch.Tensor:
    return torch.cat([x, x**2], 1) + 0.01 * torch.randn(len(x), 4)


@pytest.mark.slow
@pytest.mark.modes
def test_a_model_prepares_its_inputs_alike_wherever_it_predicts_also_after_load(table, tmp_path, monkeypatch):
    prepare = {"transformBatch": shaken, "transformInPrediction": Squared()}
    fitted = Pipeline(stages=[stage(tmp_path, metrics=["mse"], model=Own(4, 1), **prepare)]).fit(table)
    (regressor,), held = fitted.stages, table.where("held")
    scored = values_of(fitted.transform(held), "features", "prediction")
    features = torch.tensor([row[0] for row in scored])
    expected = outputs_of(regressor.module(), Squared()(features))[:, 0].tolist()
    assert [row[1] for row in scored] == pytest.approx(expected, rel=1e-5)
    assert regressor.predict(scored[3][0]) == pytest.approx(expected[3], rel=1e-5)
    told = regressor.summary.epochs[-1].metrics["validation_mse"]
    assert regressor.evaluate(held)["mse"] == pytest.approx(told, rel=1e-5)
    fitted.save(str(tmp_path / "saved"))
    monkeypatch.setenv("RINGSPARK_ALLOW_PICKLE", "1")
    loaded = PipelineModel.load(str(tmp_path / "saved"))
    assert values_of(loaded.transform(held), "features", "prediction") == scored


@pytest.mark.slow
def test_an_export_prepares_its_inputs_too(table, tmp_path):
    prepare = {"transformBatch": Squared(), "transformInPrediction": Squared()}
    model = stage(tmp_path, epochs=1, model=linear(1, 4), **prepare).fit(table)
    model.export(str(tmp_path / "model.pt2"))
    features = torch.randn(5, 2)
    exported = torch.export.load(tmp_path / "model.pt2").module()
    assert exported(features).equal(model.module()(Squared()(features)))


def test_a_transform_of_torch_s_own_layers_is_saved_without_pickle(table, tmp_path):
    prepare = nn.Sequential(nn.BatchNorm1d(2), nn.Flatten())
    prepare[0].running_mean.copy_(torch.tensor([0.5, -2.0]))
    layers = {"transformBatch": nn.Dropout(0.1), "transformInPrediction": prepare}
    estimator = stage(tmp_path, epochs=1, model=mlp(), **layers)
    estimator.save(str(tmp_path / "estimator"))
    model = TorchRegressor.load(str(tmp_path / "estimator")).fit(table)
    model.save(str(tmp_path / "model"))
    assert not list((tmp_path / "model").rglob("objects.pkl"))
    loaded = type(model).load(str(tmp_path / "model"))
    kept = loaded.getTransformInPrediction()[0].running_mean
    assert kept.tolist() == [0.5, -2.0]
    rows = [values_of(m.transform(table.limit(20))) for m in (model, loaded)]
    assert rows[0] == rows[1]


def test_each_label_has_the_metrics_that_suit_it(table, tmp_path):
    def finite(outputs, labels):
        return outputs.reshape(len(labels), -1).isfinite().all(1)

    metrics = [torchmetrics.classification.BinaryF1Score(), torchmetrics.MeanAbsoluteError]
    model = stage(
        tmp_path,
        TorchEstimator,
        epochs=1,
        model=two_heads(),
        labelCols=["label", "target"],
        loss=["cross_entropy", "mse"],
        predictionCols=["kind", "size"],
        metrics=[*metrics, {"finite": finite}, "mae"],
    ).fit(table.withColumn("target", F.col("target").cast("float")))
    told = model.summary.epochs[0].metrics
    labels, targets = ["BinaryF1Score", "finite"], ["MeanAbsoluteError", "finite", "mae"]
    entries = [*(f"{name}_label" for name in labels), *(f"{name}_target" for name in targets)]
    assert [name for name in told if "loss" not in name and name.startswith("validation")] == [
        f"validation_{name}" for name in entries
    ]
    assert told["train_MeanAbsoluteError_target"] == pytest.approx(told["train_mae_target"], rel=1e-5)
    assert told["train_finite_label"] == told["train_finite_target"] == 1.0
