"""Read rate of shards of references, as `data="inPlace"` makes them, against shards with copies of the rows.

Both hold the same rows in the same row groups. A case reads one shuffled epoch in batches of `BATCH_SIZE`
rows with the engine "arrow", opening included, in interleaved rounds. The writes are timed once, after a
warm-up.

    python tests/benchmarks/in_place.py --repeats 3
"""

from __future__ import annotations

import tempfile
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import harness
import pyarrow.parquet as pq
from pyspark.sql import SparkSession
from pyspark.sql import functions as F

from ringspark.extras.external_tables.in_place.file_scan import find_scan
from ringspark.jobs import cli
from ringspark.pipelines import ShardManifest, open_reader, write_shards

BATCH_SIZE = 1024
# Rows of an array are 8 times as wide.
ARRAY_SHARE = 8


def narrow(spark: SparkSession, rows: int) -> Any:
    """Returns two random doubles."""
    return spark.range(0, rows, 1, 2).select(F.rand(0).alias("x"), F.rand(1).alias("y"))


def arrays(spark: SparkSession, rows: int) -> Any:
    """Returns `harness.DIM` random floats in one array."""
    return harness.random_frame(spark, max(1, rows // ARRAY_SHARE)).select("features").coalesce(2)


TITLES = {narrow: "two doubles", arrays: f"{harness.DIM} float32 in one array"}


def write_layouts(frame: Any, root: Path) -> dict[str, Path]:
    """Writes the rows as Spark does, and in one file with row groups of several sizes."""
    frame.write.parquet(str(root / "Spark"))
    rows = pq.read_table(root / "Spark")
    folders = {"as Spark writes them": root / "Spark"}
    for size in (rows.num_rows, 10_000, 1_000):
        folders[f"row groups of {size:,}"] = root / str(size)
        (root / str(size)).mkdir()
        pq.write_table(rows, root / str(size) / "a.parquet", row_group_size=size, write_page_index=True)
    return folders


def read(manifest: ShardManifest) -> float:
    """Reads one epoch. Returns rows/s."""
    start = time.perf_counter()
    reader = open_reader(manifest, batch_size=BATCH_SIZE, engine="arrow")
    rows = sum(len(next(iter(batch.values()))) for batch in reader.batches(0))
    assert rows == manifest.num_rows
    return rows / (time.perf_counter() - start)


def measure(spark: SparkSession, frame: Any, repeats: int) -> list[list[str]]:
    """Returns the lines of the table."""
    lines = []
    with tempfile.TemporaryDirectory() as folder:
        root = Path(folder)
        for number, (name, path) in enumerate(write_layouts(frame, root).items()):
            written = spark.read.parquet(str(path))
            scan = find_scan(written, written.columns)
            makers: dict[str, Callable[[], ShardManifest]] = {
                "copy": partial(write_shards, written, str(root / f"copy-{number}"), overwrite=True),
                "in place": partial(
                    write_shards, written, str(root / f"refs-{number}"), overwrite=True, references=scan
                ),
            }
            made = {key: make() for key, make in makers.items()}
            seconds = {key: harness.seconds_of(make) for key, make in makers.items()}
            made = {key: ShardManifest.load(manifest.uri) for key, manifest in made.items()}
            assert made["copy"].row_groups == made["in place"].row_groups
            cases = {key: partial(read, manifest) for key, manifest in made.items()}
            rates = harness.measure_in_turns(cases, repeats, warm_ups=1)
            size = sum(file.num_bytes for file in made["in place"].files) / made["in place"].num_rows
            ratio = harness.median_ratio(rates["in place"], rates["copy"])
            lines.append(
                [name, f"{seconds['copy']:.1f}", f"{seconds['in place']:.1f}", f"{size:.2f}", f"{ratio:.2f}"]
            )
    return lines


def main() -> None:
    """Measures narrow rows, then arrays."""
    args = harness.parse(__doc__, rows=(2_000_000, 20_000))
    with cli.spark("ringspark bench in place", harness.MASTER) as spark:
        for make in (narrow, arrays):
            frame = make(spark, args.rows)
            harness.print_table(
                f"in_place: {TITLES[make]}, {args.rows:,} rows (arrays: 1 / {ARRAY_SHARE} of them), batches "
                f"of {BATCH_SIZE}, {args.repeats} rounds",
                ["files", "copy, s", "in place, s", "bytes of a reference", "rows/s against the copy"],
                measure(spark, frame, args.repeats),
            )


if __name__ == "__main__":
    main()
