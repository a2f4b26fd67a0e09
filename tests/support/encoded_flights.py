"""The flights as encoded shards for the benchmarks, and the network that they train on them.

Spark's own stages encode the rows of examples/flights/etl.py. Category indices, means and scales are fitted
on months 1 to 8 only.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ringspark.models import ModelSpec

if TYPE_CHECKING:
    from pyspark.ml import Pipeline, PipelineModel
    from pyspark.sql import SparkSession

# Columns with a null flag: one for each source that is often missing. More flags would repeat these.
_FLAGGED = ("temp", "pressure", "wind_dir", "wind_gust", "seats", "plane_age", "lat")
# Column name -> period, for values on a circle: 23:59 is near 00:00.
_PERIODIC = {"departure_minute": 1440, "arrival_minute": 1440, "wind_dir": 360}
# Rain, in units of 0.05 inch, is mostly 0 with a long tail, so its logarithm is used.
_LOGGED = ("precip", "precip_3h", "precip_6h")


@dataclass(frozen=True, kw_only=True)
class NetworkRecipe:
    """The entity-embedding network, trained by AdamW with a one-cycle schedule.

    A random search chose it by the score on month 9.
    """

    hidden: tuple[int, ...] = (128, 64)
    dropout: float = 0.4
    embedding_dropout: float = 0.3
    epochs: int = 3
    learning_rate: float = 3e-3
    weight_decay: float = 1e-2

    def spec(self, members: int, cardinalities: Sequence[int], num_numeric: int) -> ModelSpec:
        return ModelSpec(
            "tabular_ensemble",
            {
                "members": members,
                "cardinalities": list(cardinalities),
                "num_numeric": num_numeric,
                "hidden": list(self.hidden),
                "out_features": 1,
                "dropout": self.dropout,
                "embedding_dropout": self.embedding_dropout,
            },
        )


NETWORK = NetworkRecipe()


def write(spark: SparkSession, root: Path) -> None:
    """Writes `features`, the fitted pipeline, and the encoded training rows as `shards`, next to `train`."""
    from ringspark.pipelines import write_shards

    train = spark.read.parquet(str(root / "train"))
    features = feature_pipeline().fit(train.where("split = 'train'"))
    features.write().overwrite().save(str(root / "features"))
    encoded = features.transform(train).selectExpr(
        "categorical", "numeric", "label", "split = 'validation' AS is_validation"
    )
    write_shards(encoded, str(root / "shards"), validation_col="is_validation", overwrite=True)


def feature_pipeline() -> Pipeline:
    """Returns a Spark ML pipeline from the rows of the flights to the columns `categorical` and `numeric`.

    `categorical` is array<int>, and `numeric` a vector. A null category becomes "unknown"; a category that is
    not in the training rows gets the last index. A null number becomes the training mean; some columns also
    get a flag for nulls.
    """
    from pyspark.ml import Pipeline
    from pyspark.ml.feature import Imputer, SQLTransformer, StandardScaler, StringIndexer, VectorAssembler

    from flights import CATEGORICAL, NUMERIC

    texts = [f"coalesce({name}, 'unknown') AS {name}_text" for name in CATEGORICAL]
    numbers: dict[str, str] = {name: name for name in NUMERIC if name not in _LOGGED}
    for name, period in _PERIODIC.items():
        angle = f"{name} * {2 * math.pi / period!r}"
        numbers |= {f"{name}_sin": f"sin({angle})", f"{name}_cos": f"cos({angle})"}
    numbers |= {f"{name}_log": f"ln(1 + 20 * {name})" for name in _LOGGED}
    numbers["dew_spread"] = "temp - dewp"
    # A compass angle has no meaning as a plain number.
    del numbers["wind_dir"]
    flags = {f"{name}_missing": f"CAST({name} IS NULL AS double)" for name in _FLAGGED}
    derived = [f"{sql} AS {name}_num" for name, sql in (numbers | flags).items()]
    filled = [f"{name}_filled" for name in numbers]
    indices = ", ".join(f"CAST({name}_index AS int)" for name in CATEGORICAL)
    stages: list[Any] = [
        SQLTransformer(statement=f"SELECT *, {', '.join(texts + derived)} FROM __THIS__"),
        StringIndexer(
            inputCols=[f"{name}_text" for name in CATEGORICAL],
            outputCols=[f"{name}_index" for name in CATEGORICAL],
            handleInvalid="keep",
        ),
        Imputer(inputCols=[f"{name}_num" for name in numbers], outputCols=filled, strategy="mean"),
        VectorAssembler(inputCols=[*filled, *(f"{name}_num" for name in flags)], outputCol="numeric_raw"),
        StandardScaler(inputCol="numeric_raw", outputCol="numeric", withMean=True),
        SQLTransformer(statement=f"SELECT *, array({indices}) AS categorical FROM __THIS__"),
    ]
    return Pipeline(stages=stages)


def feature_sizes(features: PipelineModel) -> tuple[list[int], int]:
    from pyspark.ml.feature import StringIndexerModel, VectorAssembler

    indexer = next(stage for stage in features.stages if isinstance(stage, StringIndexerModel))
    assembler = next(stage for stage in features.stages if isinstance(stage, VectorAssembler))
    # The index after the labels is for categories that are not in the training rows.
    return [len(labels) + 1 for labels in indexer.labelsArray], len(assembler.getInputCols())
