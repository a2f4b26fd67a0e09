"""Custom training steps through `fit`: restarts, resumes and predictions."""

from pathlib import Path
from typing import Any

import numpy as np
import own_training_steps as steps
import pytest
import torch
from failing_callback import Fails
from parity import assert_equal_weights
from pyspark.sql import functions as F

from ringspark.estimators import TorchEstimator, WorkerError

pytestmark = [pytest.mark.spark, pytest.mark.slow]
SETTINGS: dict[str, Any] = {"trainingStep": steps.gan_step, "optimizer": steps.gan_optimizers}
SETTINGS |= {"featuresCol": "noise", "labelCols": ["point"], "validationFraction": 0.2, "seed": 1}
SETTINGS |= {"batchSize": 32, "epochs": 2, "numWorkers": 2, "checkpointEverySteps": 2}
SETTINGS |= {"timeoutSeconds": 60.0, "showProgress": False}


@pytest.fixture(scope="module")
def rows(spark: Any) -> Any:
    return spark.range(200, numPartitions=2).select(
        F.array(F.randn(1), F.randn(2) - 1).alias("point"),
        F.array(*(F.randn(3 + number) for number in range(4))).alias("noise"),
    )


def fit(rows: Any, **changes: Any) -> Any:
    torch.manual_seed(0)
    return TorchEstimator(model=steps.Gan(), **(SETTINGS | changes)).fit(rows)


def test_a_killed_rank_and_a_resume_change_neither_weights_nor_history(rows: Any, tmp_path: Path) -> None:
    expected = fit(rows)
    killed = fit(rows, callbacks=[Fails(tmp_path / "killed", is_killed=True)])
    assert killed.summary.restarts == 1
    stopping = {"callbacks": [Fails(tmp_path / "failed")], "runUri": str(tmp_path / "run")}
    with pytest.raises(WorkerError, match="step 7"):
        fit(rows, **stopping, maxRestarts=0)
    resumed = fit(rows, **stopping, maxRestarts=0, resume=True)
    assert len(resumed.summary.resumed_steps) == 1
    alone = fit(rows, numWorkers=1)
    for other, tolerance in ((killed, 0.0), (resumed, 0.0), (alone, 1e-5)):
        assert_equal_weights(expected, other, tolerance)
        for one, two in zip(expected.summary.epochs, other.summary.epochs, strict=True):
            for name in ("train_loss", "validation_loss", "metrics"):
                assert getattr(one, name) == pytest.approx(getattr(two, name), rel=tolerance)


def test_the_model_of_a_gan_generates_points_from_noise(rows: Any, tmp_path: Path) -> None:
    model = fit(rows, epochs=1, numWorkers=1)
    model.write().overwrite().save(str(tmp_path / "model"))
    found = type(model).load(str(tmp_path / "model")).transform(rows.limit(5)).select("noise", "prediction")
    taken = found.collect()
    noise = torch.tensor([row.noise for row in taken], dtype=torch.float32)
    with torch.no_grad():
        expected = model.module()(noise).numpy()
    assert np.allclose([row.prediction for row in taken], expected, atol=1e-6)
