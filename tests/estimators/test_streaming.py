"""Structured Streaming scores arriving files like a batch over all of them."""

from __future__ import annotations

import pytest
import torch

from ringspark.estimators import TorchClassificationModel
from ringspark.estimators.training.checkpoint.weights import save_checkpoint
from ringspark.models import ModelSpec

pytestmark = pytest.mark.spark

SCHEMA = "id long, note string, features array<double>"
SPEC = ModelSpec("mlp", {"in_features": 2, "hidden": [8], "out_features": 3})


@pytest.mark.modes
@pytest.mark.parametrize("handling", ["skip", pytest.param("keep", marks=pytest.mark.slow)])
def test_a_stream_scores_files_as_they_arrive(spark, tmp_path, handling):
    torch.manual_seed(0)
    save_checkpoint(str(tmp_path / "c"), SPEC.build())
    model = TorchClassificationModel(model=SPEC, handleInvalid=handling)
    model._set_trained(str(tmp_path / "c"), [(3,)], None)
    arriving = str(tmp_path / "arriving")

    def arrive(start: int) -> None:
        """Adds a file; each file has a null, a null inside an array, and a NaN."""
        nan = float("nan")
        rows = [(start + i, f"row {start + i}", [i / 3, float(start)]) for i in range(17)]
        rows += [
            (start + 17, "null", None),
            (start + 18, "null inside", [1.0, None]),
            (start + 19, "NaN", [nan, 1.0]),
        ]
        spark.createDataFrame(rows, SCHEMA).coalesce(1).write.mode("append").parquet(arriving)

    def score_what_has_arrived() -> None:
        scored = model.transform(spark.readStream.schema(SCHEMA).parquet(arriving))
        assert scored.isStreaming
        query = (
            scored.writeStream.format("parquet")
            .option("checkpointLocation", str(tmp_path / "progress"))
            .trigger(availableNow=True)
            .start(str(tmp_path / "scored"))
        )
        assert query.awaitTermination(300)
        assert query.exception() is None

    for start in (0, 100):
        arrive(start)
        score_what_has_arrived()
    found = spark.read.parquet(str(tmp_path / "scored"))
    batch = model.transform(spark.read.schema(SCHEMA).parquet(arriving))
    assert found.count() == (34 if handling == "skip" else 40)
    columns = ["id", "note", "rawPrediction", "probability", "prediction"]
    rows, expected = (frame.select(columns).orderBy("id").collect() for frame in (found, batch))
    assert rows == expected
    assert sum(row.prediction is None for row in rows) == (0 if handling == "skip" else 6)
