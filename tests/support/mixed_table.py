"""Generates a table of 30 columns for benchmarks: numbers, strings, a date, missing values, two classes."""

from __future__ import annotations

from typing import TYPE_CHECKING

from pyspark.sql import functions as F

if TYPE_CHECKING:
    from pathlib import Path

    from pyspark.sql import DataFrame, SparkSession

NUMBERS = tuple(f"n{i}" for i in range(20))
WORDS = tuple(f"c{i}" for i in range(8))
# Different values of each column of strings; rare ones are rarer, as names are.
_VALUES = (5, 20, 100, 500, 3_000, 5, 20, 100)


def make(spark: SparkSession, rows: int, *, seed: int = 0) -> DataFrame:
    """Returns a lazy DataFrame. The label depends on eight of the columns, and is noisy."""
    numbers = [
        # Every fourth number is skewed, and a tenth of its values is missing.
        F.randn(seed + i) * (1 + i % 3)
        if i % 4
        else F.when(F.rand(seed + 100 + i) > 0.1, F.exp(F.randn(seed + i)))
        for i in range(len(NUMBERS))
    ]
    words = [
        F.concat(F.lit("v"), F.floor(F.rand(seed + 200 + i) ** 2 * count).cast("string"))
        for i, count in enumerate(_VALUES)
    ]
    frame = spark.range(0, rows, 1, 8).select(
        *(column.alias(name) for name, column in zip((*NUMBERS, *WORDS), (*numbers, *words), strict=True)),
        F.date_add(F.lit("2023-01-01").cast("date"), (F.rand(seed + 300) * 600).cast("int")).alias("day"),
        F.floor(F.rand(seed + 301) * 24).cast("int").alias("hour"),
    )
    score = (
        0.7 * F.col("n1")
        + F.sin(2 * F.col("n2"))
        + 0.4 * F.col("n3") * F.col("n5")
        + F.when(F.col("n4").isNull(), 0.5).otherwise(0.0)
        + F.when(F.col("c0") == "v0", 0.8).otherwise(0.0)
        + (F.pmod(F.xxhash64("c3"), F.lit(100)) - 50) / 50
        + F.when(F.col("hour") > 17, 0.6).otherwise(0.0)
    )
    chance = 1 / (1 + F.exp(-score))
    return frame.withColumn("label", (F.rand(seed + 999) < chance).cast("int"))


def write(spark: SparkSession, rows: int, folder: Path) -> None:
    for name, size, seed in (("train", rows, 0), ("test", rows // 5, 10_000)):
        make(spark, size, seed=seed).write.mode("overwrite").parquet(str(folder / f"{name}.parquet"))
