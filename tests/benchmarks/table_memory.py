"""Memory of `fit` and `transform` on a table, for a number of rows and a tenth of it.

Each size runs in a separate process, whose JVM has a heap of 1 GiB. Two workers train a small
network for one epoch: more rows could only cost memory in the pass for statistics, in the shards and in the
readers. The table has the highest anonymous and the highest resident memory, in MiB, of the Python driver,
of the largest Python worker, and of the JVM, which is driver and executors in one.

    python tests/benchmarks/table_memory.py --rows 10000000
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
import time

import harness
from big_model import watch

from ringspark.jobs import cli

MIB = 1 << 20


def write_rows(folder: str, rows: int) -> None:
    """Writes the table, in a process of its own."""
    import mixed_table

    with cli.spark("rows", harness.MASTER) as spark:
        mixed_table.make(spark, rows).write.mode("overwrite").parquet(folder)


def fit_and_transform(folder: str, rows: int) -> None:
    """Trains on the table, and predicts all of its rows."""
    from pyspark.sql import SparkSession

    from ringspark.estimators import TorchClassifier
    from ringspark.models import ModelSpec

    estimator = TorchClassifier(
        labelCol="label",
        model=ModelSpec("tabpack", {"width": 32, "rates": [1.0], "dropouts": [0.1]}),
        numWorkers=harness.NUM_WORKERS,
        epochs=1,
        batchSize=min(8192, rows // 8),
        showProgress=False,
    )
    # `cli.spark` takes a running session; its own would have a heap of 3 GiB.
    os.environ["PYSPARK_PYTHON"] = sys.executable
    builder = SparkSession.builder.master(harness.MASTER).config("spark.driver.memory", "1g")
    builder.config("spark.ui.enabled", False).config("spark.sql.shuffle.partitions", 8).getOrCreate()
    with cli.spark("table_memory") as spark:
        frame = spark.read.parquet(folder)
        start = time.perf_counter()
        model = estimator.fit(frame)
        print(f"{rows:,} rows: fit {time.perf_counter() - start:.1f} s", flush=True)
        start = time.perf_counter()
        model.transform(frame).select("prediction").write.format("noop").mode("overwrite").save()
        print(f"{rows:,} rows: transform {time.perf_counter() - start:.1f} s", flush=True)


STEPS = {"write": write_rows, "fit": fit_and_transform}


def main() -> None:
    """Runs both sizes, and prints the table."""
    if sys.argv[1:2] == ["--step"]:
        name, folder, rows = sys.argv[2:]
        STEPS[name](folder, int(rows))
        return
    args = harness.parse(__doc__, rows=(10_000_000, 20_000))
    peaks: list[list[float]] = []
    for rows in (args.rows // 10, args.rows):
        with tempfile.TemporaryDirectory() as folder:
            command = [sys.executable, __file__, "--step"]
            subprocess.run([*command, "write", f"{folder}/rows", str(rows)], check=True)
            found = watch([*command, "fit", f"{folder}/rows", str(rows)], cwd=folder)
        peaks.append([n / MIB for n in found])
    few, many = peaks
    harness.print_table(
        "table_memory: peaks in MiB, own = anonymous memory",
        ["rows", *(f"{who} {what}" for who in ("driver", "worker", "JVM") for what in ("own", "RSS"))],
        [
            [f"{args.rows // 10:,}", *(f"{n:,.0f}" for n in few)],
            [f"{args.rows:,}", *(f"{n:,.0f}" for n in many)],
            ["ratio", *(f"{b / a:.2f}" for a, b in zip(few, many, strict=True))],
        ],
    )


if __name__ == "__main__":
    main()
