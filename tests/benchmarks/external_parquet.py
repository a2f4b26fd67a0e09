"""Read rate of external tables, without a copy, against shards of the same rows, by layout.

Every case reads one shuffled epoch in batches of `BATCH_SIZE` rows with the engine "arrow", opening included,
in interleaved rounds. Before that, each table is scanned once for its manifest, as `fitOnParquet` does, and
the shards are written. Both are timed once, after a small warm-up.

- Spark: `df.write.parquet` with Spark's defaults, one file per partition, two partitions.
- 1,000 rows: row groups of this size, in one pyarrow file with a tenth of the rows.
- one row group: all rows in one, written by pyarrow with a page index, which the reader uses.
- memory: largest growth of the process's anonymous memory in an epoch, in MiB.

    python tests/benchmarks/external_parquet.py --repeats 3
"""

from __future__ import annotations

import tempfile
import time
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import harness
import pyarrow as pa
import pyarrow.parquet as pq
from cache_memory import MIB, Peaks
from pyspark.sql import SparkSession
from pyspark.sql import functions as F

from ringspark.extras.external_tables import list_parquet, table_manifest
from ringspark.jobs import cli
from ringspark.pipelines import ShardManifest, open_reader, write_shards

BATCH_SIZE = 1024
SHARDS = "shards of write_shards"
SHARE = 10
# Rows of an array are 8 times as wide.
ARRAY_SHARE = 25


def narrow(spark: SparkSession, rows: int) -> Any:
    """Returns two random doubles."""
    return spark.range(0, rows, 1, 2).select(F.rand(0).alias("x"), F.rand(1).alias("y"))


def arrays(spark: SparkSession, rows: int) -> Any:
    """Returns `harness.DIM` random floats in one array."""
    return harness.random_frame(spark, max(1, rows // ARRAY_SHARE)).select("features").coalesce(2)


TITLES = {narrow: "two doubles", arrays: f"{harness.DIM} float32 in one array"}
HEADER = [
    "", "row groups", "read in", "scan or write, s", "median", "min", "max", "ratio to shards", "MiB",
]  # fmt: skip


def write_layouts(frame: Any, root: Path) -> dict[str, Path]:
    """Writes the rows in every layout. Returns the folders."""
    folders = {name: root / name for name in ("Spark", "1,000 rows", "one row group")}
    frame.write.parquet(str(folders["Spark"]))
    rows = pq.read_table(folders["Spark"])
    for name, part, size in (
        ("1,000 rows", rows.slice(0, max(1, rows.num_rows // SHARE)), 1_000),
        ("one row group", rows, rows.num_rows),
    ):
        folders[name].mkdir()
        pq.write_table(part, folders[name] / "part.parquet", row_group_size=size, write_page_index=True)
    return folders


def timed(make: Callable[[], ShardManifest]) -> tuple[float, ShardManifest]:
    """Returns the seconds and the result of one call."""
    start = time.perf_counter()
    manifest = make()
    return time.perf_counter() - start, manifest


def read(manifest: ShardManifest) -> float:
    """Reads one epoch. Returns rows/s."""
    start = time.perf_counter()
    reader = open_reader(manifest, batch_size=BATCH_SIZE, engine="arrow")
    rows = sum(len(next(iter(batch.values()))) for batch in reader.batches(0))
    assert rows == manifest.num_rows
    return rows / (time.perf_counter() - start)


def peak(manifest: ShardManifest) -> float:
    """Returns the peak growth of anonymous memory in one epoch, in MiB."""
    pa.default_memory_pool().release_unused()
    with Peaks() as peaks:
        read(manifest)
    return peaks.own / MIB


def measure(spark: SparkSession, frame: Any, repeats: int) -> tuple[int, list[list[str]]]:
    """Returns the number of rows and the lines of the table."""
    with tempfile.TemporaryDirectory() as folder:
        root = Path(folder)
        layouts = write_layouts(frame, root)
        written = spark.read.parquet(str(layouts["Spark"]))
        warm = written.limit(100)
        write_shards(warm, str(root / "warm"))
        warm.write.parquet(str(root / "warm-table"))
        table_manifest(spark, list_parquet(spark, str(root / "warm-table")))
        makers: Mapping[str, Callable[[], ShardManifest]] = {
            SHARDS: lambda: write_shards(written, str(root / "shards")),
            **{name: partial(_look, spark, path) for name, path in layouts.items()},
        }
        made = {name: timed(make) for name, make in makers.items()}
        memory = {name: peak(manifest) for name, (_, manifest) in made.items()}  # also warms up
        cases = {name: partial(read, manifest) for name, (_, manifest) in made.items()}
        rates = harness.measure_in_turns(cases, repeats, warm_ups=0)
        lines = harness.rate_rows(rates, SHARDS)
        for line in lines:
            seconds, manifest = made[line[0]]
            groups = sum(len(file.row_groups) for file in manifest.files)
            line[1:1] = [f"{groups:,}", f"{len(manifest.row_groups):,}", f"{seconds:.1f}"]
            line.append(f"{memory[line[0]]:,.0f}")
        return made[SHARDS][1].num_rows, lines


def _look(spark: SparkSession, path: Path) -> ShardManifest:
    return table_manifest(spark, list_parquet(spark, str(path)))


def main() -> None:
    """Measures narrow rows, then arrays."""
    args = harness.parse(__doc__, rows=(10_000_000, 20_000))
    with cli.spark("ringspark bench tables", harness.MASTER) as spark:
        for make in (narrow, arrays):
            rows, lines = measure(spark, make(spark, args.rows), args.repeats)
            harness.print_table(
                f"external_parquet: rows/s of one epoch, {rows:,} rows, {TITLES[make]}, batches of "
                f"{BATCH_SIZE}, {args.repeats} rounds",
                HEADER,
                lines,
            )


if __name__ == "__main__":
    main()
