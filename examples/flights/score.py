"""Predicts the test rows by `ringspark score`, and compares the network with gradient boosting.

    python examples/flights/score.py --data artifacts/flights
    spark-submit --py-files dist/ringspark-0.1.0.zip examples/flights/score.py --data s3a://bucket/flights

Reads `model`, `train` and `test` below `--data`. Writes `predictions` (Parquet) and prints metrics. The
baseline is trained on the same columns.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Mapping
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from etl import DEFAULT_ROOT
from flights import CATEGORICAL, NUMERIC
from ringspark.jobs import cli, command
from ringspark.pipelines import storage
from ringspark.pipelines.notebook_table import align_table
from ringspark.pipelines.spark_paths import resolve

if TYPE_CHECKING:
    from pandas import DataFrame as PandasFrame

Encoded = dict[str, npt.NDArray[Any]]
Scored = tuple[npt.NDArray[Any], npt.NDArray[Any]]
"""Labels (0 or 1) and a model's probabilities of class 1, each of shape (rows,)."""
# Columns of the predictions.
COLUMNS = "time_hour,carrier,flight,origin,dest,label,prediction,probability"

# Arguments of scikit-learn's boosting. A random search chose them by the score on month 9.
BOOSTING = {
    "max_iter": 450,
    "learning_rate": 0.05,
    "max_leaf_nodes": 31,
    "min_samples_leaf": 20,
    "l2_regularization": 10.0,
    "max_features": 0.3,
}


def build_parser() -> cli.JobParser:
    parser = cli.JobParser("score", "Predict the test rows with the saved model and report how well.")
    parser.add_argument(
        "--data", default=DEFAULT_ROOT, metavar="URI", help="output folder of etl and the training"
    )
    parser.add_argument("--seed", type=int, default=0, help="seed of gradient boosting, the baseline")
    cli.add_master(parser)
    return parser


def run(args: argparse.Namespace) -> None:
    if find_spec("sklearn") is None:
        raise ValueError("the metrics need sklearn; pip install 'ringspark[examples]'")
    with cli.spark("ringspark score", args.master) as spark:
        from pyspark.ml.functions import vector_to_array
        from pyspark.sql import functions as F

        root = resolve(spark, args.data)
        jobs = {"model": "ringspark train examples/flights/train.yaml", "test": "examples/flights/etl.py"}
        for name, job in jobs.items():
            if not storage.exists(storage.join(root, name)):
                raise ValueError(f"no {name} at {storage.join(root, name)}; run {job} first, or give --data")
        model, test, output = (storage.join(root, name) for name in ("model", "test", "predictions"))
        score = ["score", model, "--parquet", test, "--output", output, "--overwrite", "--columns", COLUMNS]
        given = command.build_parser().parse_args(score)
        given.command_run(given)
        # Read the written predictions; the DataFrame would predict again.
        probability = vector_to_array(F.col("probability"))[1].alias("probability")
        written = spark.read.parquet(output).select("label", probability).toPandas()
        models = {"network": (written["label"].to_numpy(), written["probability"].to_numpy())}
        frames = [spark.read.parquet(storage.join(root, name)) for name in ("train", "test")]
        tables = [frame.select(*CATEGORICAL, *NUMERIC, "label").toPandas() for frame in frames]
    models["gradient boosting"] = _score_boosting(*_encode(*tables), args.seed)
    print(format_table(models))


def format_table(models: Mapping[str, Scored]) -> str:
    """Returns ROC AUC and average precision (higher is better), and log loss (lower is better)."""
    from sklearn.metrics import average_precision_score, log_loss, roc_auc_score

    for name, (labels, _) in models.items():
        if (found := np.unique(labels).tolist()) != [0, 1]:
            raise ValueError(f"{name}: the labels must hold both classes, 0 and 1, got {found}")
    measures = (roc_auc_score, average_precision_score, log_loss)
    rows = [(name, *(f"{measure(*scored):.4f}" for measure in measures)) for name, scored in models.items()]
    return align_table(("model", "ROC AUC", "average precision", "log loss"), rows, num_left=1)


def _encode(train: PandasFrame, test: PandasFrame) -> tuple[Encoded, Encoded]:
    """Numbers the strings of each category in the order of the training rows' strings; -1 is unknown."""
    orders = {name: sorted(train[name].dropna().unique()) for name in CATEGORICAL}

    def encode(rows: PandasFrame) -> Encoded:
        import pandas as pd

        codes = [pd.Index(order).get_indexer(rows[name]) for name, order in orders.items()]
        return {
            "categorical": np.stack(codes, axis=1),
            "numeric": rows[list(NUMERIC)].to_numpy(np.float32),
            "label": rows["label"].to_numpy(),
        }

    return encode(train), encode(test)


def train_boosting(rows: Encoded, seed: int) -> Any:
    from sklearn.ensemble import HistGradientBoostingClassifier

    boosting = HistGradientBoostingClassifier(**BOOSTING, early_stopping=False, random_state=seed)
    return boosting.fit(boosting_matrix(rows), rows["label"])


def boosting_matrix(rows: Encoded) -> npt.NDArray[np.float32]:
    """Concatenates the columns to one matrix of numbers, shape (rows, features).

    Boosting accepts missing numbers. Category indices are used as numbers too: on the validation
    month, this was better than boosting's own handling of categories.
    """
    return np.hstack([rows["categorical"].astype(np.float32), rows["numeric"]])


def _score_boosting(train: Encoded, test: Encoded, seed: int) -> Scored:
    started = time.perf_counter()
    boosting = train_boosting(train, seed)
    print(f"score: gradient boosting trained in {time.perf_counter() - started:.1f} s", flush=True)
    return test["label"], boosting.predict_proba(boosting_matrix(test))[:, 1]


if __name__ == "__main__":
    sys.exit(cli.main(build_parser(), run))
