"""Structured Streaming scores arriving files like a batch over all of them."""

import pytest
from ready_models import ready_model
from small_networks import mlp
from spark_tables import run_stream

from ringspark.estimators import TorchClassificationModel

pytestmark = pytest.mark.spark

SCHEMA = "id long, note string, features array<double>"


@pytest.mark.modes
@pytest.mark.parametrize("handling", ["skip", pytest.param("keep", marks=pytest.mark.slow)])
def test_a_stream_scores_files_as_they_arrive(spark, tmp_path, handling):
    folder = tmp_path / "c"
    model = ready_model(TorchClassificationModel, mlp(3), folder, [(3,)], handleInvalid=handling)
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

    for start in (0, 100):
        arrive(start)
        scored = model.transform(spark.readStream.schema(SCHEMA).parquet(arriving))
        assert scored.isStreaming
        found = run_stream(scored, tmp_path)
    batch = model.transform(spark.read.schema(SCHEMA).parquet(arriving))
    assert found.count() == (34 if handling == "skip" else 40)
    columns = ["id", "note", "rawPrediction", "probability", "prediction"]
    rows, expected = (frame.select(columns).orderBy("id").collect() for frame in (found, batch))
    assert rows == expected
    assert sum(row.prediction is None for row in rows) == (0 if handling == "skip" else 6)
