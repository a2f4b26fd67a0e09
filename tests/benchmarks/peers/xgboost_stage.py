"""xgboost.spark's SparkXGBClassifier.

On the flights it has the boosting recipe of examples/flights/score.py, on the mixed table its defaults.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import contest
import harness
import mixed_table
from pyspark.ml import Pipeline
from pyspark.ml.feature import StringIndexer
from pyspark.sql import functions as F
from xgboost.spark import SparkXGBClassifier

from ringspark.jobs import cli
from score import BOOSTING

if TYPE_CHECKING:
    from pyspark.sql import DataFrame


def with_features(frame: DataFrame) -> DataFrame:
    """Encodes categories as numbers, like the baseline of examples/flights/score.py."""
    joined = F.concat(F.col("categorical").cast("array<float>"), "numeric")
    return frame.withColumn("features", joined)


def flights(entry: contest.Entry) -> contest.Figures:
    """Translates the recipe to xgboost's parameters. Leaves grow best first, as in scikit-learn."""
    classifier = SparkXGBClassifier(
        features_col="features",
        label_col="label",
        num_workers=harness.NUM_WORKERS,
        n_estimators=BOOSTING["max_iter"],
        learning_rate=BOOSTING["learning_rate"],
        grow_policy="lossguide",
        max_leaves=BOOSTING["max_leaf_nodes"],
        max_depth=0,
        reg_lambda=BOOSTING["l2_regularization"],
        colsample_bynode=BOOSTING["max_features"],
        random_state=0,
    )

    def fit(frame: DataFrame) -> Any:
        return classifier.fit(with_features(frame))

    with cli.spark("xgboost.spark", harness.MASTER) as spark:
        return contest.measure_table(
            spark, entry.flights, fit, lambda model, frame: model.transform(with_features(frame))
        )


def table(entry: contest.Entry) -> contest.Figures:
    """Numbers the strings by a StringIndexer and the days as integers, and takes the default settings."""
    numbered = [f"{name}_number" for name in mixed_table.WORDS]
    classifier = SparkXGBClassifier(
        features_col=[*mixed_table.NUMBERS, *numbered, "day_number", "hour"],
        label_col="label",
        num_workers=harness.NUM_WORKERS,
        random_state=0,
    )

    def with_days(frame: DataFrame) -> DataFrame:
        return frame.withColumn("day_number", F.unix_date("day").cast("double"))

    def fit(frame: DataFrame) -> Any:
        indexer = StringIndexer(inputCols=list(mixed_table.WORDS), outputCols=numbered, handleInvalid="keep")
        return Pipeline(stages=[indexer, classifier]).fit(with_days(frame))

    with cli.spark("xgboost.spark", harness.MASTER) as spark:
        return contest.measure_table(
            spark, entry.table, fit, lambda model, frame: model.transform(with_days(frame))
        )


def contestant(entry: contest.Entry) -> contest.Figures:
    """Runs the job that the variant names."""
    return {"flights": flights, "table": table}[entry.variant](entry)


if __name__ == "__main__":
    contest.run(contestant)
