"""Atomicity of `write_shards`: the state of the folder after a SIGKILL at random moments.

Each kill runs in a separate Spark application: the driver, its JVM and its Python workers are killed during a
write. The moment is random and seeded, and the moments cover the duration of a write. Then the folder must
hold no shards, all rows of the previous write, or all rows of this one, including the digest of every file.
The next writer must succeed.

    python tests/benchmarks/killed_writers.py --repeats 20    # kills of each case

The exit code is 1 if any folder holds anything else.
"""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import harness
import numpy as np
import psutil

from ringspark.pipelines import ShardManifest, open_reader, write_shards

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

SEED = 11
# Write times vary. The last moments must cover the commit and the removal of old files in a slow write, too.
SPREAD = 1.3
OLD, NEW, LATER = 0, 1, 2


@dataclass(frozen=True, kw_only=True)
class Kill:
    """One killed write and its outcome."""

    case: str
    seconds: float
    share: float
    left: str
    found: str
    later: str

    @property
    def is_right(self) -> bool:
        """True if readers and the next writer succeed."""
        accepted = ("no shards", "new") if self.case == "fresh" else ("old", "new")
        return self.found in accepted and self.later == "later"


def main() -> int:
    """Runs the cases and prints the table. Returns 1 if any outcome is wrong."""
    if len(sys.argv) > 1 and sys.argv[1] == "--writer":
        return write(sys.argv[2], rows=int(sys.argv[3]), overwrite=sys.argv[4] == "overwrite")
    options = harness.parse(__doc__, repeats=(20, 1), rows=(400_000, 50_000))
    draw = random.Random(SEED)
    kills = []
    with tempfile.TemporaryDirectory() as folder:
        root = Path(folder)
        spark = session()
        # Use the faster of two writes, because a late moment kills nothing.
        duration = min(kill_at(root / f"measured-{n}", None, options.rows, "fresh") for n in range(2))
        print(f"a whole write of {options.rows:,} rows takes {duration:.2f} s", flush=True)
        for case in ("fresh", "overwrite"):
            # Stratified random moments: one in each of equal parts of the write.
            shares = [SPREAD * (part + draw.random()) / options.repeats for part in range(options.repeats)]
            draw.shuffle(shares)
            for number, share in enumerate(shares):
                uri = root / f"{case}-{number}"
                if case == "overwrite":
                    write_shards(rows_of(spark, OLD, 1_000), str(uri))
                kill_at(uri, share * duration, options.rows, case)
                kills.append(look(spark, uri, case, options.rows, share, duration))
                print(f"{case} {share:.2f}: {kills[-1].found}, then {kills[-1].later}", flush=True)
        spark.stop()
    harness.print_table(
        f"{len(kills)} writes killed with SIGKILL",
        ("case", "killed after", "share of write", "left behind", "reader finds", "next writer"),
        [
            [k.case, f"{k.seconds:.2f} s", f"{k.share:.0%}", k.left, k.found, k.later]
            for k in sorted(kills, key=lambda k: (k.case, k.share))
        ],
    )
    wrong = [kill for kill in kills if not kill.is_right]
    print(f"{len(wrong)} of {len(kills)} outcomes are wrong")
    return 1 if wrong else 0


def session() -> SparkSession:
    """Returns a small local session without console output."""
    from pyspark.sql import SparkSession

    os.environ["PYSPARK_PYTHON"] = sys.executable
    builder = SparkSession.builder.master(harness.MASTER).config("spark.ui.enabled", "false")
    spark = builder.config("spark.ui.showConsoleProgress", "false").getOrCreate()
    spark.sparkContext.setLogLevel("OFF")
    return spark


def rows_of(spark: SparkSession, version: int, rows: int) -> DataFrame:
    """Returns rows whose ids contain the version.

    The partitions are unequal, so that a write balances the files.
    """
    from pyspark.sql import functions as F

    values = F.array(*((F.col("id") * factor).cast("double") for factor in range(1, 9)))
    data = spark.range(version << 32, (version << 32) + rows, 1, 2).select("id", values.alias("x"))
    small = spark.range((version << 32) + rows, (version << 32) + rows + rows // 10, 1, 2)
    return data.unionAll(small.select("id", values.alias("x")))


def num_rows(rows: int) -> int:
    """Returns the number of rows of `rows_of`."""
    return rows + rows // 10


def write(uri: str, *, rows: int, overwrite: bool) -> int:
    """Runs in the killed process: reports that it is ready, waits for a line, writes, and reports the end."""
    spark = session()
    # Start the Python workers here, so that their start is not part of the write.
    spark.range(0, 2, 1, 2).mapInArrow(lambda batches: batches, "id long").collect()
    print("ready", flush=True)
    sys.stdin.readline()
    write_shards(rows_of(spark, NEW, rows), uri, row_group_rows=4_096, overwrite=overwrite)
    print("done", flush=True)
    sys.stdin.readline()
    return 0


def kill_at(uri: Path, seconds: float | None, rows: int, case: str) -> float:
    """Runs a writer and kills it after some seconds, or when it has finished.

    Returns its lifetime in seconds.
    """
    command = [sys.executable, __file__, "--writer", str(uri), str(rows), case]
    with subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True
    ) as process:
        assert process.stdin is not None
        assert process.stdout is not None
        assert process.stdout.readline() == "ready\n", "the writer did not start"
        # Spark's daemon of Python workers leads a separate process group, so each process gets its own
        # signal.
        everyone = [psutil.Process(process.pid), *psutil.Process(process.pid).children(recursive=True)]
        start = time.perf_counter()
        process.stdin.write("go\n")
        process.stdin.flush()
        if seconds is None:
            assert process.stdout.readline() == "done\n", "the write failed"
            lived = time.perf_counter() - start
        else:
            time.sleep(seconds)
            lived = time.perf_counter() - start
        everyone += [one for one in _children(process.pid) if one not in everyone]
        for one in everyone:
            _kill(one)
        psutil.wait_procs(everyone[1:], timeout=30)
    return lived


def look(spark: SparkSession, uri: Path, case: str, rows: int, share: float, duration: float) -> Kill:
    """Reads as a user would, then writes again."""
    names = os.listdir(uri) if uri.exists() else []
    files = sum(len(os.listdir(uri / name)) for name in names if (uri / name).is_dir())
    found = version_of(uri, {OLD: 1_000, NEW: rows})
    try:
        write_shards(rows_of(spark, LATER, 100), str(uri), overwrite=found != "no shards")
        later = version_of(uri, {LATER: 100})
    except Exception as error:
        later = f"refused: {error}"
    return Kill(
        case=case,
        seconds=share * duration,
        share=share,
        left=f"{len(names)} names, {files} files",
        found=found,
        later=later,
    )


def version_of(uri: Path, whole: dict[int, int]) -> str:
    """Returns the version if the folder holds exactly its rows, each once; or "no shards"."""
    try:
        manifest = ShardManifest.load(uri)
    except ValueError as error:
        return "no shards" if "holds no shards" in str(error) else f"refused: {error}"
    try:
        manifest.verify()
        batches: Sequence[Any] = list(open_reader(manifest, ["id"], engine="arrow").batches(0))
    except (ValueError, RuntimeError) as error:
        return f"damaged: {error}"
    ids = np.sort(np.concatenate([batch["id"] for batch in batches]))
    for version, rows in whole.items():
        if np.array_equal(ids, (version << 32) + np.arange(num_rows(rows))):
            return {OLD: "old", NEW: "new", LATER: "later"}[version]
    return f"{len(ids)} rows of no version"


def _children(pid: int) -> list[psutil.Process]:
    try:
        children: list[psutil.Process] = psutil.Process(pid).children(recursive=True)
    except psutil.NoSuchProcess:
        return []
    return children


def _kill(process: psutil.Process) -> None:
    try:
        process.send_signal(signal.SIGKILL)
    except psutil.NoSuchProcess:
        return


if __name__ == "__main__":
    sys.exit(main())
