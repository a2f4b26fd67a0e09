# Databricks notebook source
# MAGIC %md
# MAGIC # From a raw table to a forecast
# MAGIC
# MAGIC How many bicycles will people take at a station tomorrow, and is a day busy or quiet? The example is
# MAGIC an artificial table with strings, dates, decimals, booleans, ragged arrays and nulls. It shows column
# MAGIC types, windows over rows, a search, and how to save and load the result.
# MAGIC
# MAGIC Needs `ringspark` on the cluster (`%pip install ringspark`).

# COMMAND ----------

import os
import tempfile

import torch
from pyspark.ml import Pipeline, PipelineModel
from pyspark.ml.evaluation import RegressionEvaluator
from pyspark.ml.tuning import CrossValidator, ParamGridBuilder
from pyspark.sql import functions as F
from torch import nn

from ringspark.estimators import SequenceWindows, TorchClassifier, TorchRegressor
from ringspark.pipelines import HashBuckets, Padded, Vocabulary

# A folder that the driver and all workers reach.
FOLDER = "/dbfs/tmp/ringspark-tables" if os.path.isdir("/dbfs/tmp") else tempfile.mkdtemp(prefix="tables-")
# Spark takes a bare path as a DBFS path, not as a local one.
FOR_SPARK = f"file:{FOLDER}"

# COMMAND ----------

# MAGIC %md
# MAGIC ## The table
# MAGIC Eight stations over half a year. Trips follow the weekday and the rain; a few days have no weather.

# COMMAND ----------

days = spark.range(8).select(
    F.concat(F.lit("station "), F.col("id")).alias("station"),
    F.explode(F.sequence(F.lit("2024-01-01").cast("date"), F.lit("2024-06-30").cast("date"))).alias("day"),
)
chance = F.pmod(F.xxhash64("station", "day"), F.lit(1000)) / 1000  # the same in every run
weekend = F.weekday("day") >= 5
trips = days.select(
    "station",
    "day",
    F.when(chance < 0.5, "dry").when(chance < 0.8, "wet").when(chance < 0.99, "storm").alias("weather"),
    weekend.alias("weekend"),
    F.round(2 + chance, 2).cast("decimal(5,2)").alias("price"),
    F.slice(F.array(F.lit(1), F.lit(2), F.lit(3)), 1, (1 + F.day("day") % 3).cast("int")).alias("events"),
    (40 - 15 * weekend.cast("int") - 20 * chance + 3 * F.substring("station", 9, 1).cast("int")).alias(
        "trips"
    ),
).withColumn("busy", F.when(F.col("trips") > 40, "busy").otherwise("quiet"))
trips = trips.cache()
trips.show(5)

# COMMAND ----------

# MAGIC %md
# MAGIC ## Columns of every type, and a string as the label
# MAGIC Numbers, booleans, dates and decimals need no setting. `columns` chooses the column types of strings
# MAGIC and ragged arrays. Rows without weather are skipped.

# COMMAND ----------


class Table(nn.Module):
    """One argument a column -> (batch, 2) logits."""

    def __init__(self):
        super().__init__()
        self.weather, self.station = nn.Embedding(4, 4), nn.Embedding(256, 4)
        self.events = nn.Embedding(4, 4, padding_idx=0)
        self.head = nn.Sequential(nn.Linear(15, 32), nn.ReLU(), nn.Linear(32, 2))

    def forward(self, weather, station, events, weekend, price, day):
        weekday = (day + 3) % 7 / 3 - 1  # days since 1970-01-01, a Thursday
        numbers = torch.stack([weekend.float(), price - 2.5, weekday], 1)
        words = [self.weather(weather), self.station(station), self.events(events).sum(1)]
        return self.head(torch.cat([*words, numbers], 1))


classifier = TorchClassifier(
    model=Table(),
    inputCols=["weather", "station", "events", "weekend", "price", "day"],
    labelCol="busy",
    columns={"weather": Vocabulary(), "station": HashBuckets(256), "events": Padded(length=3)},
    handleInvalid="skip",
    metrics=["accuracy"],
    epochs=15,
    batchSize=64,
    learningRate=0.02,
    storageUri=f"{FOLDER}/storage",
)
past, later = trips.where("day < '2024-06-01'"), trips.where("day >= '2024-06-01'")
model = classifier.fit(past)
accuracy = model.evaluate(later)["accuracy"]
model.transform(later).select("station", "day", "weather", "busy", "predictedLabel").show(5)
print(f"accuracy of quiet and busy days in June: {accuracy:.3f}")

# COMMAND ----------

# MAGIC %md
# MAGIC ## Windows over rows
# MAGIC Each row's `features` are the last 14 days of a station, and its `label` is the trips of the next
# MAGIC day. A missing day starts a new series. `handleUnlabeled="keep"` keeps the newest day for the
# MAGIC forecast, and `handleInvalid="skip"` skips it in the training.

# COMMAND ----------

windows = SequenceWindows(
    keyCols="station",
    timeCol="day",
    valueCols=["trips", "weekend"],
    steps=14,
    targetCol="trips",
    maxGap="1 day",
    handleUnlabeled="keep",
)
print(windows.countWindows(trips))
network = TorchRegressor(
    model=nn.Sequential(nn.Flatten(), nn.Linear(28, 32), nn.ReLU(), nn.Linear(32, 1)),
    handleInvalid="skip",
    epochs=15,
    batchSize=64,
    learningRate=0.01,
    storageUri=f"{FOLDER}/storage",
)

# COMMAND ----------

# MAGIC %md
# MAGIC ## A search, then the pipeline
# MAGIC Make the windows before the search, because random folds of single rows would break the series. In
# MAGIC this example each fold is a month, because adjacent windows share most of their days.

# COMMAND ----------

folds = (
    windows.transform(past).where("label IS NOT NULL").withColumn("fold", (F.month("day") > 3).cast("int"))
)
rmse = RegressionEvaluator(metricName="rmse")
grid = ParamGridBuilder().addGrid(network.learningRate, [0.003, 0.01]).build()
search = CrossValidator(
    estimator=network, estimatorParamMaps=grid, evaluator=rmse, numFolds=2, foldCol="fold"
).fit(folds)
best = min(zip(search.avgMetrics, grid, strict=True), key=lambda tried: tried[0])[1]
forecaster = Pipeline(stages=[windows, network.copy(best)]).fit(past)
forecaster.write().overwrite().save(f"{FOR_SPARK}/forecaster")

# COMMAND ----------

# MAGIC %md
# MAGIC ## Save, load, forecast
# MAGIC The loaded pipeline takes rows with 14 days of history. The last day of each station has a forecast,
# MAGIC but no label.

# COMMAND ----------

loaded = PipelineModel.load(f"{FOR_SPARK}/forecaster")
forecasts = loaded.transform(trips.where("day >= '2024-05-18'")).cache()
error = rmse.evaluate(forecasts.where("label IS NOT NULL"))
tomorrow = forecasts.where("label IS NULL")
tomorrow.select("station", "day", "prediction").show()
print(f"RMSE of the forecasts for June: {error:.2f} trips")
