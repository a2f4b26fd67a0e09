"""Two trained models that the tests serve: one of a table, one of images."""

import base64
import datetime
import io
from pathlib import Path
from typing import Any

import pytest
from PIL import Image as Pillow
from pyspark.sql import functions as F
from pyspark.sql.types import BinaryType, StringType, StructField, StructType
from spark_tables import time_zone
from torch import nn
from without_ringspark import Served

from ringspark.estimators import TorchClassifier, TorchRegressor
from ringspark.pipelines import Image

ROWS = 200
ZONE = "Europe/Berlin"


def exported(stage: Any, folder: Path) -> Path:
    with pytest.warns():  # MLflow's libraries warn about each other's next versions
        stage.export(str(folder), format="mlflow")
    return folder


@pytest.fixture(scope="module")
def late(spark: Any, tmp_path_factory: pytest.TempPathFactory) -> Served:
    """A classifier of strings, numbers and times, some of them missing or new."""
    folder = tmp_path_factory.mktemp("late")
    with time_zone(spark, ZONE):
        table = spark.range(0, ROWS, 1, 2).select(
            F.when(F.col("id") % 7 > 0, F.sin("id")).alias("delay"),
            F.when(F.col("id") % 5 > 0, F.concat(F.lit("city "), F.col("id") % 4)).alias("city"),
            (F.col("id") % 3).cast("int").alias("stops"),
            F.expr("if(id % 11 > 0, id % 2 = 0, null)").alias("night"),
            # Both changes of the clock lie in between.
            F.timestamp_micros(F.lit(1_700_000_000_000_000) + F.col("id") * 300_000_007_001).alias("at"),
            F.date_add(F.lit("2023-11-01").cast("date"), F.col("id").cast("int") * 3).alias("day"),
            F.expr("if(sin(id) + id % 4 > 1.5, 'late', 'on time')").alias("label"),
        )
        settings = {"epochs": 12, "learningRate": 0.02, "thresholds": [0.4, 0.6], "seed": 1}
        stage = TorchClassifier(**settings, storageUri=str(folder / "runs")).fit(table)
        rows = table.drop("label").replace("city 1", "a new city", "city")
        scored = stage.transform(rows).withColumn("at", F.unix_micros("at")).collect()
        given, wanted = [], []
        for row in scored:
            own = {name: row[name] for name in ("delay", "city", "stops", "night")}
            given.append(own | {"at": _iso(row["at"]), "day": row["day"].isoformat()})
            vectors = {name: row[name].toArray().tolist() for name in ("rawPrediction", "probability")}
            wanted.append(vectors | {name: row[name] for name in ("prediction", "predictedLabel")})
        return Served(stage=stage, folder=exported(stage, folder / "model"), rows=given, wanted=wanted)


@pytest.fixture(scope="module")
def pictures(spark: Any, tmp_path_factory: pytest.TempPathFactory) -> Served:
    """A regression of images; one is missing, one is broken, and such rows are kept."""
    folder = tmp_path_factory.mktemp("pictures")
    schema = StructType([StructField("name", StringType()), StructField("picture", BinaryType())])
    good = [(str(shade), _png(shade)) for shade in range(0, 200, 10)]
    table = spark.createDataFrame(good, schema).withColumn("label", F.col("name").cast("int") / 200)
    network = nn.Sequential(nn.Conv2d(3, 2, 2), nn.Flatten(), nn.Linear(18, 1))
    inputs = {"featuresCol": "picture", "columns": {"picture": Image(4, 4, mean=0.5, std=(0.2, 0.3, 0.4))}}
    settings = {"epochs": 2, "storageUri": str(folder / "runs"), "showProgress": False}
    stage = TorchRegressor(model=network, **inputs, **settings, handleInvalid="keep").fit(table)
    given = [*good[:5], ("broken", b"no image"), ("missing", None)]
    scored = stage.transform(spark.createDataFrame(given, schema)).collect()
    return Served(
        stage=stage,
        folder=exported(stage, folder / "model"),
        rows=[{"picture": data and base64.b64encode(data).decode()} for _, data in given],
        wanted=[{"prediction": row["prediction"]} for row in scored],
    )


def _iso(microseconds: int) -> str:
    seconds, rest = divmod(microseconds, 1_000_000)
    moment = datetime.datetime.fromtimestamp(seconds, datetime.timezone.utc)
    return f"{moment.replace(tzinfo=None).isoformat()}.{rest:06}Z"


def _png(shade: int) -> bytes:
    """Returns a PNG of 9 x 5 pixels, which must be resized."""
    buffer = io.BytesIO()
    Pillow.frombytes("RGB", (9, 5), bytes((shade + 3 * i) % 256 for i in range(135))).save(buffer, "PNG")
    return buffer.getvalue()
