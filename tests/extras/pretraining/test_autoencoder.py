"""Trainings without a label through Spark."""

from collections import OrderedDict
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from failing_callback import Fails
from parity import assert_equal_weights
from pyspark.sql import functions as F
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import WhitespaceSplit
from torch import nn

from ringspark.estimators import Pretrained, TorchAutoencoder, TorchClassifier, TorchEstimator, WorkerError
from ringspark.models import ModelSpec
from ringspark.pipelines import Tokens

pytestmark = pytest.mark.spark

NETWORKS = "ringspark.extras.pretraining.networks"
DIM, CODE, ROWS = 6, 2, 256
# No step changes the weights in fp32.
STILL = {"optimizer": "sgd", "learningRate": 1e-30}


LINEAR = ModelSpec(f"{NETWORKS}:Autoencoder", {"in_features": DIM, "code": CODE})


@pytest.fixture(scope="module")
def numbers() -> Any:
    rng = np.random.default_rng(0)
    turned = np.linalg.qr(rng.normal(size=(DIM, DIM)))[0]
    rows = (rng.normal(size=(ROWS, DIM)) * [2, 1.5, 1, 0.7, 0.5, 0.3]) @ turned
    return (rows - rows.mean(0)).astype("f4")


@pytest.fixture(scope="module")
def frame(spark: Any, numbers: Any) -> Any:
    rows = [(row.tolist(), *row[:3].tolist()) for row in numbers]
    made = spark.createDataFrame(rows, "features array<float>, a float, b float, c float").coalesce(1)
    return made.cache()


@pytest.fixture
def common(tmp_path: Path) -> dict[str, Any]:
    return {"storageUri": str(tmp_path), "showProgress": False, "learningRate": 0.03, "batchSize": 64}


def test_two_workers_train_the_weights_of_one(frame: Any, common: dict[str, Any]) -> None:
    settings = common | {"noise": 0.3, "mask": 0.3, "epochs": 2, "validationFraction": 0.2}
    one, two = (TorchAutoencoder(model=LINEAR, numWorkers=n, **settings).fit(frame) for n in (1, 2))
    assert_equal_weights(one, two, 1e-5)
    losses = [model.summary.history["validation_loss"].iloc[-1] for model in (one, two)]
    assert losses[0] == pytest.approx(losses[1], rel=1e-5)


def test_held_out_rows_are_masked_alike_after_every_epoch(frame: Any, common: dict[str, Any]) -> None:
    settings = common | {"mask": 0.3, "epochs": 3, "validationFraction": 0.2, **STILL}
    stage = TorchAutoencoder(model=LINEAR, **settings)
    before = stage.explainParams()
    history = stage.fit(frame).summary.history
    assert stage.explainParams() == before
    assert history["validation_loss"].nunique() == 1
    assert history["train_loss"].nunique() == 3


def test_several_inputs_are_one_output_or_one_each(frame: Any, common: dict[str, Any]) -> None:
    inputs = {"inputCols": ["a", "b", "c"], "epochs": 1} | common
    joined = TorchAutoencoder(model=Joined(3, 3), **inputs).fit(frame).transform(frame)
    assert len(joined.first().prediction) == 3
    each = TorchAutoencoder(model=Each(3, 3), predictionCols=["p", "q", "r"], **inputs).fit(frame)
    assert each.transform(frame).select("p", "q", "r").dtypes == [(n, "double") for n in "pqr"]
    assert np.isfinite(each.summary.history["train_loss"].iloc[0])


class Joined(nn.Linear):
    def forward(self, a: torch.Tensor, b: torch.Tensor, c: torch.Tensor) -> torch.Tensor:
        return super().forward(torch.stack([a, b, c], 1))


class Each(Joined):
    def forward(self, a: torch.Tensor, b: torch.Tensor, c: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return tuple(super().forward(a, b, c).unbind(1))


def test_a_resumed_training_masks_the_same_values(frame: Any, common: dict[str, Any], tmp_path: Path) -> None:
    settings = common | {"mask": 0.3, "epochs": 2, "noise": 0.1}
    whole = TorchAutoencoder(model=LINEAR, **settings).fit(frame)
    parts = settings | {"runUri": str(tmp_path / "run"), "checkpointEverySteps": 1, "maxRestarts": 0}
    del parts["storageUri"]
    stage = TorchAutoencoder(model=LINEAR, callbacks=[Fails(tmp_path / "failed", step=6)], **parts)
    with pytest.raises(WorkerError, match="step 6"):
        stage.fit(frame)
    resumed = stage.setResume(True).fit(frame)
    assert len(resumed.summary.resumed_steps) == 1
    assert_equal_weights(whole, resumed)


@pytest.mark.slow
def test_a_table_network_starts_from_its_pretraining(spark: Any, common: dict[str, Any]) -> None:
    rng = np.random.default_rng(1)
    hidden = rng.normal(size=400)
    rows = [(float(h), float(h + rng.normal() / 4)) for h in hidden]
    columns = "x", "h * h AS y", "if(h > 0, 'b', 'a') AS city", "if(h > 1.5, null, h) AS z"
    table = spark.createDataFrame(rows, "h double, x double").selectExpr(*columns, "int(h > 0.3) AS label")
    table = table.coalesce(1)
    settings = {"storageUri": common["storageUri"], "showProgress": False}
    pretrained = TorchAutoencoder(epochs=3, **settings).fit(table.drop("label"))
    losses = pretrained.summary.history["train_loss"]
    assert losses.iloc[-1] < losses.iloc[0]
    # No step changes the weights, so they show where the training starts.
    tuned = TorchClassifier(initialModel=pretrained, epochs=1, **STILL, **settings)
    before, after = pretrained.module().state_dict(), tuned.fit(table).module().state_dict()
    for name in ("numbers.weight", "embeddings.0.weight", "hidden.0.weight", "hidden.1.weight"):
        assert torch.equal(before[name], after[name]), name
    assert after["head.weight"].shape[-1] == 2
    with pytest.raises(ValueError, match="initialState='weights'"):
        tuned.copy({tuned.initialState: "optimizer"}).fit(table)


def test_a_network_with_a_label_takes_weights_by_name(frame: Any, common: Any, tmp_path: Path) -> None:
    model = TorchAutoencoder(model=LINEAR, epochs=1, **common).fit(frame)
    labelled = frame.withColumn("label", F.col("a"))
    settings = common | {"epochs": 1} | STILL
    with pytest.raises(ValueError, match="by pretrained="):
        TorchEstimator(initialModel=model, **settings).fit(labelled)
    model.save(str(tmp_path / "saved"))
    start = Pretrained(uri=str(tmp_path / "saved"), ignore=["decoder.*"], strict=False)
    parts = {"encoder": nn.Sequential(nn.Linear(DIM, CODE)), "head": nn.Linear(CODE, 1)}
    stage = TorchEstimator(model=nn.Sequential(OrderedDict(parts)), pretrained=start, **settings)
    tuned = stage.fit(labelled).module()
    assert torch.equal(tuned.get_parameter("encoder.0.weight"), model.module().encoder[0].weight)


@pytest.mark.slow
def test_masked_tokens_are_predicted_from_their_neighbors(spark: Any, common: Any, tmp_path: Path) -> None:
    words = {"[PAD]": 0, "[MASK]": 1} | {f"w{i}": i + 2 for i in range(8)}
    tokenizer = Tokenizer(WordLevel(words, unk_token="[PAD]"))
    tokenizer.pre_tokenizer = WhitespaceSplit()
    tokens = Tokens.of(tokenizer, max_length=8)
    # Each text counts on from a random word, so a neighbor shows a masked word.
    texts = [(" ".join(f"w{(i + j) % 8}" for j in range(4 + i % 5)), i % 2) for i in range(400)]
    table = spark.createDataFrame(texts, "text string, label int").coalesce(1)
    sizes = {"vocab_size": tokens.num_ids, "max_seq_len": 8, "dim": 32, "depth": 2, "num_heads": 2}
    settings = common | {"featuresCol": "text", "columns": {"text": tokens}}
    settings |= {"learningRate": 0.003, "batchSize": 32}
    network = ModelSpec(f"{NETWORKS}:MaskedTransformer", sizes)
    model = TorchAutoencoder(model=network, mask=0.2, epochs=20, **settings).fit(table)
    assert model.summary.history["train_loss"].iloc[-1] < 0.5 * np.log(8)
    model.save(str(tmp_path / "saved"))
    start = Pretrained(uri=str(tmp_path / "saved"), ignore=["head.*"])
    spec = ModelSpec("transformer_classifier", {**sizes, "out_features": 2})
    TorchClassifier(model=spec, pretrained=start, epochs=1, **settings).fit(table)
