"""xgboost.spark's SparkXGBClassifier on the flights, with the boosting recipe of jobs/recipes.py."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import contest
import harness
from pyspark.sql import functions as F
from xgboost.spark import SparkXGBClassifier

from ringspark.jobs import cli
from ringspark.jobs.recipes import BOOSTING

if TYPE_CHECKING:
    from pyspark.sql import DataFrame


def with_features(frame: DataFrame) -> DataFrame:
    """Encodes categories as numbers, like the baseline of jobs/score.py."""
    joined = F.concat(F.col("categorical").cast("array<float>"), "numeric")
    return frame.withColumn("features", joined)


def contestant(entry: contest.Entry) -> contest.Figures:
    """Translates the recipe to xgboost's parameters. Leaves grow best first, as in scikit-learn."""
    classifier = SparkXGBClassifier(
        features_col="features",
        label_col="label",
        num_workers=harness.NUM_WORKERS,
        n_estimators=BOOSTING.max_iter,
        learning_rate=BOOSTING.learning_rate,
        grow_policy="lossguide",
        max_leaves=BOOSTING.max_leaf_nodes,
        max_depth=0,
        reg_lambda=BOOSTING.l2_regularization,
        colsample_bynode=BOOSTING.max_features,
        random_state=0,
    )

    def fit(frame: DataFrame) -> Any:
        return classifier.fit(with_features(frame))

    with cli.spark("xgboost.spark", harness.MASTER) as spark:
        return contest.measure_flights_on_spark(
            spark, entry, fit, lambda model, frame: model.transform(with_features(frame))
        )


if __name__ == "__main__":
    contest.run(contestant)
