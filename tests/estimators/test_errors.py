"""Error messages: each names the cause and the remedy, and the failed fit leaves nothing behind."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
import torch
from pyspark.sql import functions as F
from torch import nn

from ringspark.estimators import TorchClassifier, WorkerError
from ringspark.models import ModelSpec

pytestmark = pytest.mark.spark

SPEC = ModelSpec("linear", {"in_features": 2, "out_features": 1})


@pytest.fixture(scope="module")
def table(spark):
    return spark.range(60).select(
        F.array((F.col("id") / 60).cast("float"), F.lit(1.0).cast("float")).alias("features"),
        (F.col("id") % 2).cast("double").alias("label"),
        F.col("id").cast("string").alias("text"),
        F.when(F.col("id") != 7, F.col("id").cast("double")).alias("holey"),
        F.when(F.col("id") == 7, F.lit(float("nan"))).otherwise(1.0).alias("broken"),
        F.col("id").alias("many"),
        (F.col("id") / 60).alias("half"),
        F.col("id").cast("string").cast("binary").alias("bytes"),
        F.when(F.col("id") == 7, F.array("id")).otherwise(F.array("id", "id")).alias("uneven"),
        F.struct("id").alias("pair"),
        F.col("id").cast("decimal(38,2)").alias("exact"),
    )


def _fit(table: Any, root: Path, **changes: Any) -> Any:
    params: dict[str, Any] = {
        "model": SPEC,
        "epochs": 2,
        "batchSize": 8,
        "storageUri": str(root / "storage"),
        "showProgress": False,
    }
    kind = changes.pop("kind", TorchClassifier)
    return kind(**(params | changes)).fit(table)


class FailsOnRankOne(nn.Module):
    """Raises in the third training step on rank 1."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(2, 1)
        self.calls = 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        import horovod.torch as hvd

        if self.training and hvd.is_initialized():
            self.calls += 1
            if self.calls == 3 and hvd.rank() == 1:
                raise ZeroDivisionError("a bug in the model")
        return self.linear(x)  # type: ignore[no-any-return]


def test_a_model_that_raises_on_rank_one_at_step_three(table, tmp_path):

    with pytest.raises(WorkerError) as caught:
        _fit(table, tmp_path, model=FailsOnRankOne(), numWorkers=2, collective="horovod")
    first_line = str(caught.value).splitlines()[0]
    assert first_line.startswith("rank 1 on host ")
    assert first_line.endswith(
        "failed in phase 'training, epoch 1, step 3': ZeroDivisionError: a bug in the model"
    )
    assert "py4j" not in str(caught.value)
    assert not list(tmp_path.glob("storage/*"))


def test_storage_is_required_where_executors_are_elsewhere():
    from ringspark.estimators.stages.storage_root import _session_folder

    with pytest.raises(ValueError, match="storageUri is not set; on master 'yarn' give a folder"):
        _session_folder("yarn")
    assert os.path.isdir(_session_folder("local[2]"))
