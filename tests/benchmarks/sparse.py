"""Sparse features: linear models of hashed flights, sparse or dense, against Spark and scikit-learn.

Features are 2^18 sparse or 2^12 dense. Spark's FeatureHasher hashes the flights' categories, their binned
numbers, and pairs of these. Models train on months 1 to 9, and are scored by ROC AUC on months 10 to 12.
Rows/s measures the training alone, as rows x epochs or rows x iterations; "fit" is the whole call. The first
three train in interleaved rounds, the networks on 2 workers. Month 9 chose the learning rate of the networks.
All weights begin at zero.
"""

from __future__ import annotations

import tempfile
import time
from argparse import Namespace
from collections.abc import Callable
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING, Any

import harness
import numpy as np

import flights
from ringspark.jobs import cli
from ringspark.pipelines import Kind, Sparse, Vector, open_reader, write_shards

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

WIDE, NARROW = 1 << 18, 1 << 12
PAIRS = (
    ("origin", "hour"), ("dest", "carrier"), ("dest", "hour"), ("carrier", "hour"), ("origin", "weekday"),
    ("dest", "weekday"), ("origin", "wind"), ("origin", "rain"), ("origin", "clear"), ("hour", "clear"),
)  # fmt: skip
# Binned numbers are categories, because a linear model with one weight per number cannot be nonlinear.
STEPS = {
    "wind": "wind_gust",
    "rain": "precip_3h * 20",
    "clear": "visib",
    "warm": "temp / 5",
    "wet": "humid / 10",
}


@dataclass(frozen=True)
class Result:
    """Times and score of one contestant."""

    bytes_per_row: float | None
    fit: float
    rate: float
    auc: float


def hashed(rows: DataFrame, num_features: int) -> DataFrame:
    """Returns `features`, `label` and `split`."""
    from pyspark.ml.feature import FeatureHasher
    from pyspark.sql import functions as F

    for name, sql in STEPS.items():
        rows = rows.withColumn(name, F.expr(f"cast(cast({sql} as int) as string)"))
    names = [*flights.CATEGORICAL, "tailnum", "flight", *STEPS]
    for first, second in PAIRS:
        rows = rows.withColumn(f"{first}_{second}", F.concat_ws("/", first, second))
        names.append(f"{first}_{second}")
    texts = [F.coalesce(F.col(name).cast("string"), F.lit("none")).alias(name) for name in names]
    hasher = FeatureHasher(inputCols=names, outputCol="features", numFeatures=num_features)
    return hasher.transform(rows.select(*texts, "label", "split")).select("features", "label", "split")


def auc_of(scored: DataFrame) -> float:
    """Returns the area under the curve of `rawPrediction`'s second entry."""
    from pyspark.ml.evaluation import BinaryClassificationEvaluator

    return float(BinaryClassificationEvaluator().evaluate(scored))


def network(frame: DataFrame, kind: Kind, options: Namespace, folder: str) -> Result:
    """Writes shards, trains and scores a linear network with one logit."""
    from torch import nn

    from ringspark.estimators import TorchClassifier

    is_sparse = isinstance(kind, Sparse)
    width = WIDE if is_sparse else NARROW
    train, test = frame.where("split != 'test'"), frame.where("split = 'test'")
    linear = nn.EmbeddingBag(width, 1, mode="sum") if is_sparse else nn.Linear(width, 1)
    nn.init.zeros_(linear.weight)
    estimator = TorchClassifier(
        model=linear,
        columns={"features": kind},
        optimizer="adagrad",
        learningRate=0.03,
        lrSchedule="cosine",
        epochs=options.epochs,
        batchSize=1024,
        numWorkers=harness.NUM_WORKERS,
        collective="torch",
        storageUri=folder,
        showProgress=False,
    )
    began = time.perf_counter()
    model = estimator.fit(train)
    fit = time.perf_counter() - began
    written = Path(tempfile.mkdtemp(dir=folder)) / "shards"
    manifest = write_shards(train.select("features", "label"), str(written), columns={"features": kind})
    num_bytes = sum(file.stat().st_size for file in written.rglob("*.parquet"))
    return Result(
        num_bytes / manifest.num_rows, fit, model.summary.rows_per_second, auc_of(model.transform(test))
    )


def spark_regression(frame: DataFrame, options: Namespace) -> Result:
    """Trains and scores Spark's logistic regression on the sparse vectors."""
    from pyspark.ml.classification import LogisticRegression

    train = frame.where("split != 'test'")
    began = time.perf_counter()
    model = LogisticRegression(maxIter=options.iterations, regParam=1e-5, standardization=False).fit(train)
    fit = time.perf_counter() - began
    rows = train.count()
    return Result(
        None,
        fit,
        rows * model.summary.totalIterations / fit,
        auc_of(model.transform(frame.where("split = 'test'"))),
    )


def matrix_of(frame: DataFrame, uri: str) -> tuple[Any, Any]:
    """Returns the sparse vectors and labels in scikit-learn's format."""
    from scipy.sparse import csr_matrix, vstack

    manifest = write_shards(frame.select("features", "label"), uri, columns={"features": Sparse()})
    rows, labels = [], []
    with closing(open_reader(manifest, batch_size=65_536, shuffle=False)) as reader:
        for batch in reader.batches(0):
            parts = (batch["features.data"], batch["features.indices"], batch["features.indptr"])
            rows.append(csr_matrix(parts, shape=(len(batch["label"]), WIDE)))
            labels.append(batch["label"])
    return vstack(rows, format="csr"), np.concatenate(labels)


def scikit_learn(frame: DataFrame, options: Namespace, folder: str) -> Result:
    """Trains and scores scikit-learn's logistic regression on the same matrix, in one process."""
    from sklearn.linear_model import LogisticRegression
    from sklearn.metrics import roc_auc_score

    x, y = matrix_of(frame.where("split != 'test'"), f"{folder}/matrix-train")
    x_test, y_test = matrix_of(frame.where("split = 'test'"), f"{folder}/matrix-test")
    model = LogisticRegression(C=options.c / 100, max_iter=options.iterations, solver="liblinear")
    seconds = harness.seconds_of(lambda: model.fit(x, y))
    auc = float(roc_auc_score(y_test, model.decision_function(x_test)))
    return Result(None, seconds, len(y) * float(np.max(model.n_iter_)) / seconds, auc)


def joined_rows(spark: SparkSession, folder: str, is_tiny: bool) -> DataFrame:
    """Returns the flights joined with weather and planes, and `label` and `split`."""
    from pyspark.sql import functions as F

    tables = flights.read_tables(spark, flights.unpack_raw_tables(folder))
    rows = flights.label_rows(flights.join_tables(tables))
    if is_tiny:
        rows = rows.where(F.pmod(F.xxhash64(*flights.KEYS), F.lit(50)) == 0)
    return rows.repartition(harness.NUM_WORKERS).persist()


def main() -> None:
    """Runs the contestants in interleaved rounds and prints the table."""
    options = harness.parse(__doc__, repeats=(3, 1), epochs=(5, 1), iterations=(50, 5), c=(10, 10))
    with cli.spark("sparse", harness.MASTER) as spark, tempfile.TemporaryDirectory() as folder:
        rows = joined_rows(spark, folder, options.tiny)
        wide, narrow = hashed(rows, WIDE).persist(), hashed(rows, NARROW).persist()
        for frame in (wide, narrow):
            frame.count()
        cases: dict[str, Callable[[], Result]] = {
            "network, 2^18 sparse": lambda: network(wide, Sparse(), options, folder),
            "network, 2^12 dense": lambda: network(narrow, Vector(), options, folder),
            "Spark's LogisticRegression, 2^18": lambda: spark_regression(wide, options),
        }
        found: dict[str, list[Result]] = {name: [] for name in cases}
        for _ in range(options.repeats):
            for name, case in cases.items():
                found[name].append(case())
        found["scikit-learn's LogisticRegression, 2^18"] = [scikit_learn(wide, options, folder)]
    lines = []
    for name, results in found.items():
        size = results[0].bytes_per_row
        lines.append(
            [
                name,
                "" if size is None else f"{size:,.0f}",
                f"{median(result.fit for result in results):.1f}",
                f"{median(result.rate for result in results):,.0f}",
                f"{results[0].auc:.4f}",
            ]
        )
    header = ["flights hashed", "bytes/row", "fit, s", "rows/s", "test ROC AUC"]
    harness.print_table("Sparse columns, 2 workers", header, lines)


if __name__ == "__main__":
    main()
