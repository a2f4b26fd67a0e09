"""Private trainings through Spark: the summary, saved models, continued trainings and restarts."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from failing_callback import Dies
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as F
from torch import nn

from ringspark.estimators import TorchClassificationModel, TorchClassifier
from ringspark.extras.privacy.ledger import compute_epsilon

ROWS = 600


@pytest.fixture(scope="module")
def frame(spark: SparkSession) -> DataFrame:
    rng = np.random.default_rng(0)
    x = rng.normal(size=(ROWS, 2))
    rows = [(each.tolist(), float(each[0] > each[1]), i % 6 == 0) for i, each in enumerate(x)]
    return spark.createDataFrame(rows, ["features", "label", "public"]).repartition(2).cache()


def classifier(**changes: Any) -> TorchClassifier:
    network = nn.Sequential(nn.Linear(2, 8), nn.Tanh(), nn.Linear(8, 2))
    given: dict[str, Any] = {"model": network, "batchSize": 50, "epochs": 8, "learningRate": 0.05}
    given |= {"collective": "local", "privacy": {"epsilon": 3, "delta": 1e-6, "maxGradNorm": 1.0}}
    return TorchClassifier(**given | changes)


@pytest.mark.slow
@pytest.mark.distributed
def test_a_private_fit_keeps_its_promise_through_a_restart(frame: DataFrame, tmp_path: Path) -> None:
    gang = {"numWorkers": 2, "collective": "torch", "callbacks": [Dies(tmp_path / "died", step=30)]}
    held_out = {"validationIndicatorCol": "public", "metrics": ["auroc"]}
    estimator = classifier(**gang, **held_out, checkpointEverySteps=20, runUri=str(tmp_path / "run"))
    model = estimator.fit(frame)
    spent = model.summary.privacy
    assert model.summary.restarts == 1
    (first, rate, lost), (second, _, rest) = spent.charged
    assert (rate, lost, rest) == (0.1, 30, 60)
    assert second > first
    assert 2.97 < spent.epsilon <= 3
    assert json.loads((tmp_path / "run" / "privacy.json").read_text())["epsilon"] == spent.epsilon
    history = model.summary.history
    assert history["train_loss"].isna().all()
    assert history["validation_auroc"].iloc[-1] > 0.9
    assert "training loss" not in model.summary.sentence
    model.write().save(str(tmp_path / "model"))
    assert TorchClassificationModel.load(str(tmp_path / "model")).summary.privacy == spent
    share = model.transform(frame).select(F.avg((F.col("prediction") == F.col("label")).cast("double")))
    assert share.first()[0] > 0.8


@pytest.mark.telling
def test_a_continued_training_adds_to_the_first(frame: DataFrame) -> None:
    first = classifier(epochs=2).fit(frame)
    more = classifier(epochs=1, privacy={"epsilon": 4, "delta": 1e-6, "maxGradNorm": 1.0})
    second = more.setInitialModel(first).fit(frame)
    spent = second.summary.privacy
    assert spent.charged[0] == first.summary.privacy.charged[0]
    assert [steps for *_, steps in spent.charged] == [24, 12]
    assert first.summary.privacy.epsilon <= 3 < spent.epsilon <= 4
    assert spent.epsilon == compute_epsilon(spent.charged, 1e-6, "rdp")
    with pytest.raises(ValueError, match=r"the 24 earlier steps have spent .*; raise epsilon"):
        more.copy({more.privacy: {"epsilon": 2, "delta": 1e-6, "maxGradNorm": 1.0}}).fit(frame)
