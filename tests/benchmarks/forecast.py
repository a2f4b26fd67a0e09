"""Forecasts of departures by airport and hour: a GRU over windows, against scikit-learn on lags.

The flights and the weather of 2013 make three series of 8,754 hours: departures, delay, temperature, wind,
rain and visibility. A window contains the last 168 hours, and the target is the number of departures in each
of the next 3. A flight counts in the hour of its departure, so no row contains later data. All models get the
same windows. Windows that end with their targets before September are for training, and windows with targets
in October to December are the test set. The recipes were chosen by hand from a few each, with the scores of
September and of the test months in view.
"""

from __future__ import annotations

import tempfile
from argparse import Namespace
from functools import partial
from typing import TYPE_CHECKING, Any

import harness
import numpy as np
import torch
from torch import nn

import flights
from ringspark.estimators import SequenceWindows, TorchRegressor
from ringspark.jobs import cli

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

HORIZON = 3
HOURS_OF_WEEK = 168
RECENT = 24  # hours of all values; a model gets the departures of the whole window
TRAINED_UNTIL = "2013-09-01"
SCORED = "hour >= timestamp'2013-10-01' - interval 1 hour"  # hours of the last row of a window
WEATHER = {"temp": 20.0, "wind_speed": 10.0, "precip": 0.1, "visib": 10.0}
# Values of a window. Each is divided by about its deviation; the label has the scale of the departures.
VALUES = ["departures", "delay", *WEATHER, "hour_of_week", "airport"]
FLIGHTS = 20.0


class Forecaster(nn.Module):
    """(batch, steps, values) -> (batch, HORIZON): the same hours last week plus the GRU's output."""

    def __init__(self, steps: int, hidden: int = 64, dim: int = 16) -> None:
        super().__init__()
        self.hour, self.airport = nn.Embedding(HOURS_OF_WEEK, dim), nn.Embedding(3, dim)
        num_values = len(VALUES) - 2 + dim
        self.gru = nn.GRU(num_values, hidden, batch_first=True)
        self.head = nn.Sequential(
            nn.Linear(hidden + steps + num_values + dim, 128),
            nn.GELU(),
            nn.Dropout(0.2),
            nn.Linear(128, HORIZON),
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        numbers, hour, airport = x[..., :-2], x[..., -2].long(), x[:, -1, -1].long()
        recent = torch.cat([numbers, self.hour(hour)], 2)[:, -RECENT:]
        states, _ = self.gru(recent)
        departures = numbers[..., 0]
        seen = [states[:, -1], departures, recent[:, -1], self.airport(airport)]
        # The window is one week long, so its first values are the target hours of the week before.
        forecast: torch.Tensor = self.head(torch.cat(seen, 1)) + departures[:, :HORIZON]
        return FLIGHTS * forecast


def hourly(spark: SparkSession, folder: str) -> DataFrame:
    """Returns a row per airport and hour of the year, also without departures; all values as floats."""
    from pyspark.sql import Window
    from pyspark.sql import functions as F

    tables = flights.read_tables(spark, f"file:{flights.unpack_raw_tables(folder)}")
    seconds = F.unix_timestamp("time_hour") + 60 * (F.col("minute") + F.col("dep_delay"))
    left = tables["flights"].withColumn("hour", F.timestamp_seconds(F.floor(seconds / 3600) * 3600))
    counts = (
        left.where("dep_delay IS NOT NULL")
        .groupBy("origin", "hour")
        .agg(F.count("*").alias("departures"), F.avg("dep_delay").alias("delay"))
    )
    # One reading is 1048 miles per hour; real values are below 80.
    weather = tables["weather"].withColumn("wind_speed", F.expr("if(wind_speed < 80, wind_speed, null)"))
    weather = weather.select("origin", F.col("time_hour").alias("hour"), *WEATHER)
    origins = spark.createDataFrame([("EWR", 0), ("JFK", 1), ("LGA", 2)], "origin string, airport int")
    hours = "sequence(timestamp'2013-01-01 10:00', timestamp'2014-01-01 03:00', interval 1 hour)"
    grid = origins.select("*", F.expr(f"explode({hours})").alias("hour"))
    # Missing weather is filled with the last reading.
    known = Window.partitionBy("origin").orderBy("hour").rowsBetween(Window.unboundedPreceding, 0)
    joined = grid.join(counts, ["origin", "hour"], "left").join(weather, ["origin", "hour"], "left")
    # The hour of the week in New York.
    clock = F.from_utc_timestamp("hour", "America/New_York")  # the session uses UTC
    scaled = {
        "departures": F.coalesce("departures", F.lit(0)) / FLIGHTS,
        "delay": F.coalesce("delay", F.lit(0.0)) / 40,
        "hour_of_week": F.weekday(clock) * 24 + F.hour(clock),
        "airport": F.col("airport"),
    }
    for name, spread in WEATHER.items():
        scaled[name] = F.coalesce(F.last(name, ignorenulls=True).over(known), F.lit(0.0)) / spread
    values = [scaled[name].cast("float").alias(name) for name in VALUES]
    return joined.select("origin", "hour", *values, F.coalesce("departures", F.lit(0)).alias("count"))


def arrays(windows: DataFrame, folder: str) -> tuple[np.ndarray, np.ndarray]:
    """Returns the windows, (rows, steps, values), and the labels, (rows, HORIZON), from a file."""
    import pyarrow.parquet as pq

    windows.select("features", "label").write.parquet(folder)
    table = pq.read_table(folder).combine_chunks()
    labels = table["label"].combine_chunks().flatten().to_numpy().reshape(-1, HORIZON)
    features = table["features"].combine_chunks().flatten().flatten().to_numpy()
    return features.reshape(len(labels), -1, len(VALUES)), labels


def lags(x: np.ndarray, *, all_values: bool) -> np.ndarray:
    """Returns the features of scikit-learn's models: a vector per window."""
    last = x[:, -1]
    if all_values:  # for a linear model, with the hour and the airport one-hot
        hour, airport = np.eye(HOURS_OF_WEEK)[last[:, -2].astype(int)], np.eye(3)[last[:, -1].astype(int)]
        return np.concatenate([x[..., :-2].reshape(len(x), -1), hour, airport], 1)
    return np.concatenate([x[..., 0], x[:, -RECENT:, 1:-2].reshape(len(x), -1), last[:, -2:]], 1)


def ridge(train: Any, test: Any) -> np.ndarray:
    from sklearn.linear_model import Ridge

    x, y = train
    return Ridge(alpha=100).fit(lags(x, all_values=True), y).predict(lags(test[0], all_values=True))


def boosting(train: Any, test: Any, *, iterations: int) -> np.ndarray:
    from sklearn.ensemble import HistGradientBoostingRegressor

    x, y = lags(train[0], all_values=False), lags(test[0], all_values=False)
    fits = [
        HistGradientBoostingRegressor(max_iter=iterations, learning_rate=0.05, random_state=0).fit(
            x, train[1][:, i]
        )
        for i in range(HORIZON)
    ]
    return np.stack([fit.predict(y) for fit in fits], 1)


def network(
    rows: DataFrame, stage: SequenceWindows, folder: str, options: Namespace
) -> tuple[np.ndarray, np.ndarray]:
    """Returns forecasts and labels of the test windows from one Pipeline."""
    from pyspark.ml import Pipeline
    from pyspark.sql import functions as F

    regressor = TorchRegressor(
        model=Forecaster(options.steps),
        epochs=options.epochs,
        batchSize=256,
        learningRate=2e-3,
        lrSchedule="one_cycle",
        weightDecay=1e-2,
        numWorkers=harness.NUM_WORKERS,
        storageUri=folder,
        showProgress=False,
    )
    # Only rows before September, so no training window or target is later.
    model = Pipeline(stages=[stage, regressor]).fit(rows.where(F.col("hour") < TRAINED_UNTIL))
    found = model.transform(rows).where(SCORED).select("prediction", "label").collect()
    return np.array([row.prediction for row in found]), np.array([row.label for row in found])


def main() -> None:
    """Trains all models, then prints their errors."""
    options = harness.parse(__doc__, epochs=(15, 1), steps=(168, 24), iterations=(400, 5))
    from pyspark.sql import functions as F

    with tempfile.TemporaryDirectory() as folder, cli.spark("ringspark forecast", harness.MASTER) as spark:
        spark.conf.set("spark.sql.session.timeZone", "UTC")
        rows = hourly(spark, f"{folder}/raw").cache()
        stage = SequenceWindows(
            keyCols="origin",
            timeCol="hour",
            valueCols=VALUES,
            steps=options.steps,
            targetCol="count",
            horizon=HORIZON,
            maxGap="1 hour",
            targetTimeCol="until",
        )
        print(f"rows that end a window, and why others do not: {stage.countWindows(rows)}")
        windows = stage.transform(rows)
        train = arrays(windows.where(F.col("until") < TRAINED_UNTIL), f"{folder}/train")
        test = arrays(windows.where(SCORED), f"{folder}/test")
        print(f"windows: {len(train[1]):,} to train, {len(test[1]):,} to score")
        results = {}
        for name, model in {
            "same hour last week": lambda train, test: FLIGHTS * test[0][:, :HORIZON, 0],
            "ridge on lags": ridge,
            "HistGradientBoostingRegressor on lags": partial(boosting, iterations=options.iterations),
        }.items():
            found: list[np.ndarray] = []
            seconds = harness.seconds_of(lambda model=model, found=found: found.append(model(train, test)))
            results[name] = (found[0], test[1], seconds)
        ours: list[Any] = []
        seconds = harness.seconds_of(lambda: ours.append(network(rows, stage, folder, options)))
        assert len(ours[0][1]) == len(test[1])
        results["ringspark, GRU"] = (*ours[0], seconds)
    lines = []
    best = min(np.abs(p - y).mean() for p, y, _ in results.values())
    for name, (forecast, label, seconds) in results.items():
        error = forecast - label
        mae, rmse = np.abs(error).mean(), np.sqrt((error**2).mean())
        lines.append([name, f"{mae:.3f}", f"{rmse:.3f}", f"{mae / best:.3f}", f"{seconds:.1f}"])
    harness.print_table(
        f"departures of the next {HORIZON} hours, October to December, windows of {options.steps} hours",
        ["", "MAE", "RMSE", "MAE / best", "seconds"],
        lines,
    )


if __name__ == "__main__":
    main()
