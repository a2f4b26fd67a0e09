"""Seconds of `write_shards` against Spark's Parquet writer, on the same cached DataFrames.

Both write all columns with zstd into a new folder; its removal is not timed. Spark writes a vector as a
struct of indices and float64 values. `write_shards` writes float32, dense unless `Sparse()` is set, and also
computes statistics and digests. So the last line of the table compares unequal sizes: a sparse column made
dense contains every zero.
"""

from __future__ import annotations

import shutil
import tempfile
import uuid
from argparse import Namespace
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING

import harness

from ringspark.jobs import cli
from ringspark.pipelines import Kind, Sparse, write_shards

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

COLUMN_TARGET, VECTOR_TARGET = 1.25, 1.5
SPARSE_DIM, SPARSE_WORDS = 128, 10
INT_RANGES = (10, 1_000, 100_000, 1 << 20, 1 << 31)


@dataclass(frozen=True, kw_only=True)
class Comparison:
    """One line of the table.

    Attributes:
        make: Makes the lazy DataFrame.
        target: Largest acceptable ratio of seconds.
        columns: Column options of `write_shards`.
    """

    make: Callable[[SparkSession, int], DataFrame]
    target: float
    columns: Mapping[str, Kind] = field(default_factory=dict)


def arrays(spark: SparkSession, rows: int) -> DataFrame:
    """Returns an array column of `harness.DIM` floats."""
    return harness.random_frame(spark, rows).select("features")


def scalars(spark: SparkSession, rows: int) -> DataFrame:
    """Returns 20 columns: 5 int, 5 bigint, 4 float, 4 double, 2 boolean. Some integers repeat."""
    from pyspark.sql import functions as F

    columns = {}
    for number, high in enumerate(INT_RANGES):
        columns[f"int{number}"] = (F.rand(number) * high).cast("int")
        columns[f"bigint{number}"] = (F.rand(10 + number) * high).cast("bigint") * (1 << 20)
    for number in range(4):
        columns[f"float{number}"] = F.rand(20 + number).cast("float")
        columns[f"double{number}"] = F.rand(30 + number)
    for number in range(2):
        columns[f"boolean{number}"] = F.rand(40 + number) < 0.5
    frame = spark.range(0, rows, 1, harness.NUM_WORKERS)
    return frame.select([column.alias(name) for name, column in columns.items()])


def dense_vectors(spark: SparkSession, rows: int) -> DataFrame:
    """Returns a column of dense vectors of `harness.DIM` values."""
    from pyspark.ml.functions import array_to_vector

    return arrays(spark, rows).select(array_to_vector("features").alias("features"))


def sparse_vectors(spark: SparkSession, rows: int) -> DataFrame:
    """Returns a column of sparse vectors: `SPARSE_WORDS` words per row, hashed to `SPARSE_DIM` counts."""
    from pyspark.ml.feature import HashingTF
    from pyspark.sql import functions as F

    words = [(F.rand(number) * 10_000).cast("int").cast("string") for number in range(SPARSE_WORDS)]
    frame = spark.range(0, rows, 1, harness.NUM_WORKERS).select(F.array(*words).alias("words"))
    hashing = HashingTF(numFeatures=SPARSE_DIM, inputCol="words", outputCol="features")
    return hashing.transform(frame).select("features")


COMPARISONS = {
    f"{harness.DIM} float32 in one array column": Comparison(make=arrays, target=COLUMN_TARGET),
    "20 mixed scalar columns": Comparison(make=scalars, target=COLUMN_TARGET),
    f"dense vectors of {harness.DIM}": Comparison(make=dense_vectors, target=VECTOR_TARGET),
    f"sparse vectors of {SPARSE_DIM}, kept: Sparse()": Comparison(
        make=sparse_vectors, target=VECTOR_TARGET, columns={"features": Sparse()}
    ),
    f"sparse vectors of {SPARSE_DIM}, made dense": Comparison(make=sparse_vectors, target=VECTOR_TARGET),
}


class Writer:
    """Times one way of writing one DataFrame, each time into a new folder.

    Attributes:
        num_bytes: Bytes of Parquet that the last call wrote.
    """

    def __init__(self, write: Callable[[str], object], root: Path) -> None:
        self._write = write
        self._root = root
        self.num_bytes = 0

    def seconds(self) -> float:
        """Writes once. Returns the seconds."""
        folder = self._root / uuid.uuid4().hex
        try:
            seconds = harness.seconds_of(partial(self._write, str(folder)))
            self.num_bytes = sum(path.stat().st_size for path in folder.rglob("*.parquet"))
        finally:
            shutil.rmtree(folder, ignore_errors=True)
        return seconds


def write_parquet(frame: DataFrame, uri: str) -> None:
    """Writes with Spark's Parquet writer."""
    frame.write.option("compression", "zstd").parquet(uri)


def compare(spark: SparkSession, name: str, options: Namespace, root: Path) -> list[str]:
    """Measures one comparison. Returns its line of the table."""
    comparison = COMPARISONS[name]
    frame = comparison.make(spark, options.rows).cache()
    assert frame.count() == options.rows
    mine = Writer(lambda uri: write_shards(frame, uri, columns=comparison.columns), root)
    theirs = Writer(partial(write_parquet, frame), root)
    seconds = harness.measure_in_turns(
        {"write_shards": mine.seconds, "Spark": theirs.seconds}, options.repeats
    )
    frame.unpersist(blocking=True)
    return [
        name,
        *(f"{median(seconds[who]):.2f}" for who in ("write_shards", "Spark")),
        *(f"{writer.num_bytes / 1e6:,.1f}" for writer in (mine, theirs)),
        f"{harness.median_ratio(seconds['write_shards'], seconds['Spark']):.2f}",
        f"{comparison.target:.2f}",
    ]


def main() -> None:
    """Measures one DataFrame after another, with the two writers in interleaved rounds."""
    options = harness.parse(__doc__, rows=(500_000, 2_000))
    with (
        tempfile.TemporaryDirectory() as folder,
        cli.spark("ringspark bench write", harness.MASTER) as spark,
    ):
        lines = [compare(spark, name, options, Path(folder)) for name in COMPARISONS]
    harness.print_table(
        f"write_rate: {options.rows:,} cached rows, {harness.MASTER}, zstd, medians of {options.repeats} "
        "rounds; ratio: seconds of write_shards / seconds of Spark",
        ["", "write_shards s", "Spark s", "write_shards MB", "Spark MB", "ratio", "target"],
        lines,
    )


if __name__ == "__main__":
    main()
