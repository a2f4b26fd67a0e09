"""Spark's MultilayerPerceptronClassifier on the flights, with the hidden layers of encoded_flights.py."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING

import contest
import harness
from encoded_flights import NETWORK
from pyspark.ml import Pipeline, PipelineModel
from pyspark.ml.classification import MultilayerPerceptronClassifier
from pyspark.ml.feature import OneHotEncoder, VectorAssembler
from pyspark.ml.functions import array_to_vector
from pyspark.sql import functions as F

from ringspark.jobs import cli

if TYPE_CHECKING:
    from pyspark.sql import DataFrame


def with_columns(frame: DataFrame, cardinalities: list[int]) -> DataFrame:
    """Returns the one-hot encoded categories; rare ones share the last column."""
    categories = {
        f"category{i}": F.least(F.col("categorical")[i], F.lit(min(size, contest.MAX_CATEGORIES) - 1))
        for i, size in enumerate(cardinalities)
    }
    return frame.withColumns({**categories, "numbers": array_to_vector("numeric")})


def contestant(entry: contest.Entry) -> contest.Figures:
    """Uses one-hot categories, because it has no embeddings.

    Everything except the layers is default: L-BFGS.
    """
    sizes = json.loads(Path(entry.flights, "sizes.json").read_text())
    cardinalities = sizes["cardinalities"]
    names = [f"category{i}" for i in range(len(cardinalities))]
    hot = [f"{name}_hot" for name in names]

    def fit(frame: DataFrame) -> PipelineModel:
        rows = with_columns(frame, cardinalities)
        # A category without training rows becomes zeros, because the sizes come from the training rows.
        encoder = OneHotEncoder(inputCols=names, outputCols=hot, handleInvalid="keep").fit(rows)
        width = sum(encoder.categorySizes) + sizes["num_numeric"]
        assemble = VectorAssembler(inputCols=[*hot, "numbers"], outputCol="features")
        network = MultilayerPerceptronClassifier(layers=[width, *NETWORK.hidden, 2], seed=0)
        return Pipeline(stages=[encoder, assemble, network]).fit(rows)

    with cli.spark("Spark's perceptron", harness.MASTER) as spark:
        return contest.measure_table(
            spark,
            entry.flights,
            fit,
            lambda model, frame: model.transform(with_columns(frame, cardinalities)),
        )


if __name__ == "__main__":
    contest.run(contestant)
