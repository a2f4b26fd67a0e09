"""Prediction intervals: the share of test labels that they cover, on random and on later rows.

    make bench ARGS="intervals"
    make bench ARGS="intervals --tables FOLDER --only diamonds,vic_elec"

A quarter of the rows is the test: random rows, or the newest rows of a table with a time. `fit` gets the
rest, and holds out random rows, or its newest rows if timeCol is "set". "quantiles" trains the quantiles at
both ends of the interval, "mean" only the mean. The width is relative to the label's deviation. `--tables`
takes a folder of regressions, as tables.py does.
"""

from __future__ import annotations

import json
import warnings
from pathlib import Path
from typing import TYPE_CHECKING, Any

import harness
import numpy as np
import pandas as pd
from pyspark.sql import Window
from pyspark.sql import functions as F
from sklearn.datasets import load_diabetes, make_friedman1
from tables import read

from ringspark.estimators import TorchRegressor
from ringspark.jobs import cli

if TYPE_CHECKING:
    from collections.abc import Iterator

    from pyspark.sql import DataFrame, SparkSession

HEADER = ["table", "rows", "test", "timeCol", "trained", "covered", "width", "pinball loss"]


def made_tables(rows: int) -> dict[str, tuple[pd.DataFrame, str | None]]:
    """Returns tables with a `label` and the name of their time column, if they have one."""
    rng = np.random.default_rng(0)
    x, clean = make_friedman1(rows, random_state=0)
    friedman = pd.DataFrame(x).add_prefix("x").assign(label=clean + 4 * x[:, 0] * rng.normal(size=rows))
    time = np.arange(rows, dtype=np.float64)
    drifting = friedman.assign(time=time, label=friedman["label"] * (1 + time / rows))
    diabetes = load_diabetes(as_frame=True).frame.rename(columns={"target": "label"})
    return {"diabetes": (diabetes, None), "friedman": (friedman, None), "drifting": (drifting, "time")}


def tables(spark: SparkSession, args: Any) -> Iterator[tuple[str, DataFrame, str | None]]:
    """Yields name, rows and time column of each table."""
    if not args.tables:
        for name, (frame, time) in made_tables(args.rows).items():
            yield name, spark.createDataFrame(frame).repartition(4).cache(), time
        return
    folder = Path(args.tables)
    for name, about in json.loads((folder / "tables.json").read_text()).items():
        if about["task"] == "regression" and name in (args.only.split(",") if args.only else [name]):
            yield name, read(spark, folder, name, about).drop("split"), about["time"]


def measure(rows: DataFrame, time: str | None, holds_newest: bool, quantiles: Any, args: Any) -> list[str]:
    """Returns the cells of one fit. The test rows are the newest ones, or random ones without `time`."""
    order = F.xxhash64(*rows.columns) if time is None else F.col(time)
    ranked = rows.withColumn("share", F.percent_rank().over(Window.orderBy(order))).cache()
    train, test = (ranked.where(part).drop("share") for part in ("share < 0.75", "share >= 0.75"))
    estimator = TorchRegressor(
        intervals=args.percent / 100,
        timeBudgetSeconds=args.seconds,
        showProgress=False,
        numWorkers=harness.NUM_WORKERS,
    )
    estimator.setQuantiles(quantiles).setTimeCol(time if holds_newest else None)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # the columns that are left out
        model = estimator.fit(train)
    found = model.transform(test).selectExpr(
        "avg(int(label between interval.lower and interval.upper))",
        "avg(interval.upper - interval.lower) / stddev(label)",
    )
    covered, width = found.first()
    loss = model.evaluate(test)["pinball_loss"] if quantiles else float("nan")
    ranked.unpersist()
    place = "random" if time is None else "later"
    return [
        place,
        "set" if holds_newest else "-",
        "quantiles" if quantiles else "mean",
        f"{100 * covered:.1f} %",
        f"{width:.2f}",
        f"{loss:.4g}",
    ]


def main() -> None:
    """Measures every table."""
    parser = harness.parser(__doc__, rows=(8_000, 600), seconds=(60, 2), percent=(90, 90))
    parser.add_argument("--tables", metavar="DIR", help="folder with tables.json and a CSV file per table")
    parser.add_argument("--only", default="", metavar="NAMES", help="tables, as a,b; default: all")
    args = parser.parse_args()
    side = (1 - args.percent / 100) / 2
    lines = []
    with cli.spark("intervals", harness.MASTER) as spark:
        for name, rows, time in tables(spark, args):
            count = f"{rows.count():,}"
            for by, holds_newest in [(None, False), *([(time, False), (time, True)] if time else [])]:
                for quantiles in ((side, 0.5, 1 - side), None):
                    cells = measure(rows, by, holds_newest, quantiles, args)
                    lines.append([name, count, *cells])
                    print("  ".join(lines[-1]), flush=True)
            rows.unpersist()
    harness.print_table(f"intervals for {args.percent} % of the labels", HEADER, lines)


if __name__ == "__main__":
    main()
