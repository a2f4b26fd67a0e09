"""Training of Keras models: as the same torch network, resumed, through Spark, saved and loaded."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from parity import equal_to_undisturbed
from pyspark.ml import Pipeline, PipelineModel
from pyspark.ml.feature import VectorAssembler
from small_training import columns_of, config_of, train_in_turn
from torch import nn

from ringspark.estimators import TorchClassificationModel, TorchClassifier
from ringspark.estimators.options.sync import Zero
from ringspark.estimators.training.checkpoint.weights import map_checkpoint
from ringspark.estimators.training.settings.config import TrainConfig, UserObjects
from ringspark.extras.keras_models.library import import_keras
from ringspark.models.adapters import adapt_network

pytestmark = pytest.mark.slow
keras = import_keras()
layers = keras.layers


class Noise(layers.Layer):
    """Draws from Keras' global generator; workers get this class by value."""

    def call(self, x: Any, training: bool | None = None) -> Any:
        return x + 0.1 * keras.random.normal(x.shape) if training else x


keras.saving.register_keras_serializable("training tests")(Noise)


def sequence(*parts: Any) -> Any:
    hidden = layers.Dense(16, activation="relu")
    return keras.Sequential([keras.Input((4,)), hidden, *parts, layers.Dense(1)])


def config(make_shards: Any, folder: Path, **changes: Any) -> TrainConfig:
    manifest = make_shards(columns_of(206), validation=np.arange(206) >= 190, row_group_rows=32)
    return config_of(manifest, folder / "whole", num_workers=2, collective="torch", **changes)


def state_of(uri: str, model: Any) -> dict[str, torch.Tensor]:
    module = adapt_network(model)
    map_checkpoint(uri, module)
    return module.state_dict()


def same(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> bool:
    pairs = zip(one.values(), other.values(), strict=True)
    return all(torch.equal(left, right) for left, right in pairs)


@pytest.mark.distributed
def test_a_keras_model_trains_as_a_torch_network_also_sharded(make_shards: Any, tmp_path: Path) -> None:
    """Both draw their dropout masks from torch's generator."""
    model = sequence(layers.Dropout(0.3))
    network = adapt_network(model)
    twin = nn.Sequential(nn.Linear(4, 16), nn.ReLU(), nn.Dropout(0.3), nn.Linear(16, 1))

    def match(weights: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """Returns Keras' weights by the twin's names; Keras has (in, out)."""
        values = [v.T if v.dim() == 2 else v for v in weights.values()]
        return dict(zip(twin.state_dict(), values, strict=True))

    twin.load_state_dict(match(network.state_dict()))
    settings = config(make_shards, tmp_path)
    configs = {name: replace(settings, run_uri=str(tmp_path / name)) for name in ("whole", "sharded", "twin")}
    configs["sharded"] = replace(configs["sharded"], sync=Zero(stage=3))
    objects = {name: UserObjects(module=twin if name == "twin" else model) for name in configs}
    results = train_in_turn(configs, objects)
    expected = results.pop("twin")
    map_checkpoint(expected.checkpoint_uri, twin)
    for result in results.values():
        trained = match(state_of(result.checkpoint_uri, model))
        assert not torch.equal(trained["0.weight"], network.state_dict()[network.variables[0][0]].T)
        for name, value in twin.state_dict().items():
            torch.testing.assert_close(trained[name], value, rtol=1e-5, atol=1e-6)
        assert result.history[-1].validation_loss == pytest.approx(expected.history[-1].validation_loss)


@pytest.mark.distributed
def test_a_stopped_training_resumes_to_the_bit(make_shards: Any, tmp_path: Path) -> None:
    """With moving statistics per rank, a seeded dropout, and draws from Keras' global generator."""
    whole = config(make_shards, tmp_path, checkpoint_every_steps=4)
    model = sequence(layers.BatchNormalization(), layers.Dropout(0.3, seed=1), Noise())
    pair = equal_to_undisturbed(whole, UserObjects(module=adapt_network(model)), step=6)
    wanted, found = (state_of(result.checkpoint_uri, model) for result in pair)
    assert same(found, wanted)
    moving = next(value for name, value in found.items() if name.endswith("moving_mean"))
    assert moving.abs().min() > 0


@pytest.mark.spark
def test_a_keras_model_is_a_stage_that_is_saved_and_loaded(spark: Any, tmp_path: Path) -> None:
    keras.utils.set_random_seed(0)
    rows = spark.range(600).selectExpr("rand(1) AS a", "rand(2) AS b", "int(id % 5) AS word")
    frame = rows.selectExpr("*", "int(a > b) AS label").cache()
    numbers, word = keras.Input((2,)), keras.Input((1,), dtype="int32")
    vector = layers.Flatten()(layers.Embedding(5, 2)(word))
    hidden = layers.Dense(8, activation="relu")(layers.Concatenate()([numbers, vector]))
    hidden = Noise()(layers.Dropout(0.1)(layers.BatchNormalization()(hidden)))
    model = keras.Model([numbers, word], layers.Dense(2)(hidden))
    settings = {"epochs": 20, "batchSize": 64, "learningRate": 0.02, "numWorkers": 2, "metrics": ["accuracy"]}
    settings |= {"inputCols": ["features", "word"], "seed": 0, "storageUri": str(tmp_path / "storage")}
    classifier = TorchClassifier(model=model, **settings)
    pipeline = Pipeline(stages=[VectorAssembler(inputCols=["a", "b"], outputCol="features"), classifier])
    pipeline.save(str(tmp_path / "pipeline"))
    loaded = Pipeline.load(str(tmp_path / "pipeline"))
    start = loaded.getStages()[1].getModel()
    assert same(start.state_dict(), classifier.getModel().state_dict())

    fitted = loaded.fit(frame)
    assert not list(Path(tmp_path).rglob("*.pkl"))
    assert fitted.stages[1].evaluate(fitted.transform(frame).drop("prediction"))["accuracy"] > 0.85
    predictions = fitted.transform(frame).select("a", "b", "word", "rawPrediction").toPandas()
    fitted.save(str(tmp_path / "fitted"))
    again = PipelineModel.load(str(tmp_path / "fitted"))
    assert isinstance(again.stages[1], TorchClassificationModel)
    repeated = again.transform(frame).select("rawPrediction").toPandas()
    assert [list(row) for row in repeated.rawPrediction] == [list(row) for row in predictions.rawPrediction]
    assert not list((tmp_path / "fitted").rglob("*.pkl"))

    trained = again.stages[1].module().to_keras()
    with torch.no_grad():
        features = torch.tensor(predictions[["a", "b"]].to_numpy(), dtype=torch.float32)
        found = trained([features, torch.tensor(predictions.word.to_numpy())], training=False)
    expected = torch.tensor(np.stack([row.toArray() for row in predictions.rawPrediction])).float()
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5)
