"""`OptunaSearch` in a real session: trials on gangs, one write, pruning, going on, saving, refusals."""

from __future__ import annotations

import math
import threading
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
from pyspark.ml import Pipeline, PipelineModel
from pyspark.ml.evaluation import BinaryClassificationEvaluator
from pyspark.ml.functions import array_to_vector
from pyspark.sql import functions as F

from ringspark.estimators import TorchClassifier
from ringspark.estimators.search import Choice, IntRange, OptunaSearch, OptunaSearchModel, Uniform
from ringspark.estimators.stages import fit_data
from ringspark.models import ModelSpec
from ringspark.pipelines import write_shards

pytestmark = pytest.mark.spark

MLP = ModelSpec("mlp", {"in_features": 2, "hidden": [8], "out_features": 2})
SPACE = {
    "learningRate": Uniform(1e-3, 1.0, log=True),
    "batchSize": IntRange(16, 64, step=16),
    "model.hidden": Choice([[4], [8, 8]]),
}


@pytest.fixture(scope="module")
def table(spark: Any) -> Any:
    """240 rows of two numbers and a class, a fifth of them to be held out."""
    x = np.random.default_rng(0).normal(size=(240, 2))
    rows = [(i, float(a), float(b), float(a + b > 0), i % 5 == 0) for i, (a, b) in enumerate(x)]
    frame = spark.createDataFrame(rows, "id long, a double, b double, label double, held boolean")
    return frame.select("*", array_to_vector(F.array("a", "b")).alias("features")).repartition(2).cache()


def estimator(folder: Path, **params: Any) -> TorchClassifier:
    return TorchClassifier(
        **{
            "model": MLP,
            "epochs": 3,
            "batchSize": 32,
            "metrics": ["auroc"],
            "validationIndicatorCol": "held",
            "storageUri": str(folder),
            "showProgress": False,
        }
        | params
    )


@pytest.fixture(scope="module")
def found(table: Any, tmp_path_factory: pytest.TempPathFactory) -> tuple[OptunaSearch, OptunaSearchModel, Path]:
    """A search, its result and the folder that it wrote into."""
    folder = tmp_path_factory.mktemp("search")
    writes: list[str] = []

    def write(df: Any, uri: str, **options: Any) -> Any:
        writes.append(uri)
        return write_shards(df, uri, **options)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(fit_data, "write_shards", write)
        search = OptunaSearch(
            estimator=estimator(folder),
            space=SPACE,
            monitor="validation_auroc",
            numTrials=6,
            parallelism=3,
            seed=7,
        )
        model = search.fit(table)
    assert len(writes) == 1, "all trials read one write"
    return search, model, folder


def test_the_best_trial_is_the_model(found: Any, table: Any) -> None:
    _, model, folder = found
    trials = model.trials
    assert list(trials["number"]) == list(range(6))
    done = trials[trials["state"] == "complete"]
    best = done.loc[done["value"].idxmax()]
    assert model.bestParams["learningRate"] == best["learningRate"]
    assert model.bestModel.getModel().kwargs["hidden"] == model.bestParams["model.hidden"]
    history = model.bestModel.summary.history
    assert best["value"] == history["validation_auroc"].iloc[-1]
    assert best["epochs"] == len(history) == 3
    assert "prediction" in model.transform(table).columns
    assert [path.name.split("-")[0] for path in folder.iterdir()] == ["run"], "only the best one is kept"
