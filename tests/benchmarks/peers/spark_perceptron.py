"""Spark's own MultilayerPerceptronClassifier on the flights, with the hidden layers of jobs/recipes.py."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING

import contest
import harness
from pyspark.ml import Pipeline, PipelineModel
from pyspark.ml.classification import MultilayerPerceptronClassifier
from pyspark.ml.feature import OneHotEncoder, VectorAssembler
from pyspark.ml.functions import array_to_vector
from pyspark.sql import functions as F

from ringspark.jobs import cli
from ringspark.jobs.recipes import NETWORK

if TYPE_CHECKING:
    from pyspark.sql import DataFrame


def with_columns(frame: DataFrame, cardinalities: list[int]) -> DataFrame:
    """Each category a column of its own, the rare ones together in the last."""
    categories = {
        f"category{i}": F.least(F.col("categorical")[i], F.lit(min(size, contest.MAX_CATEGORIES) - 1))
        for i, size in enumerate(cardinalities)
    }
    return frame.withColumns({**categories, "numbers": array_to_vector("numeric")})


def contestant(entry: contest.Entry) -> contest.Figures:
    """It has no embeddings, so categories are one-hot. All but the layers are its defaults: L-BFGS."""
    sizes = json.loads(Path(entry.flights, "sizes.json").read_text())
    cardinalities = sizes["cardinalities"]
    names = [f"category{i}" for i in range(len(cardinalities))]
    hot = [f"{name}_hot" for name in names]

    def fit(frame: DataFrame) -> PipelineModel:
        rows = with_columns(frame, cardinalities)
        # A category that no training row has is a row of zeros; the sizes are those of the training rows.
        encoder = OneHotEncoder(inputCols=names, outputCols=hot, handleInvalid="keep").fit(rows)
        width = sum(encoder.categorySizes) + sizes["num_numeric"]
        assemble = VectorAssembler(inputCols=[*hot, "numbers"], outputCol="features")
        network = MultilayerPerceptronClassifier(layers=[width, *NETWORK.hidden, 2], seed=0)
        return Pipeline(stages=[encoder, assemble, network]).fit(rows)

    with cli.spark("Spark's perceptron", harness.MASTER) as spark:
        return contest.measure_flights_on_spark(
            spark, entry, fit, lambda model, frame: model.transform(with_columns(frame, cardinalities))
        )


if __name__ == "__main__":
    contest.run(contestant)
