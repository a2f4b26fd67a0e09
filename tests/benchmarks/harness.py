"""Shared parts of the benchmarks: options, interleaved rounds, data, tables.

Invariant: all values of a table are measured in one run, in interleaved rounds (A B C, A B C, ...), so that a
change of the machine's speed affects all of them. A ratio is the median of the rounds' ratios, not the ratio
of two medians.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING

from ringspark.models import ModelSpec

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

ROOT = Path(__file__).resolve().parents[2]
FLIGHTS = ROOT / "examples" / "flights"
# Folders of modules that tests and benchmarks share. pytest adds them too.
sys.path += [*(str(ROOT / "tests" / name) for name in ("support", "faults", "hosts", "gpu")), str(FLIGHTS)]

TINY_FRACTION = "0.02"  # flights
MEANINGS = {"repeats": "measured rounds", "rows": "rows of data"}
MASTER = "local[2]"
NUM_WORKERS = 2
DIM = 32
MLP = ModelSpec("mlp", {"in_features": DIM, "hidden": [128, 128], "out_features": 1})


Size = tuple[int, int]  # the value of a measurement, and the value with --tiny


def parser(description: str | None, **sizes: Size) -> argparse.ArgumentParser:
    """Returns the command line parser of one benchmark: common options and its sizes.

    Every size is an option: `epochs=(30, 1)` adds `--epochs`, with the default 30, or 1 with `--tiny`. All
    benchmarks accept the common options and ignore those that they do not need, so that one command line can
    run all of them.
    """
    from etl import DEFAULT_ROOT
    from ringspark.jobs import cli

    made = argparse.ArgumentParser(
        description=description, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False
    )
    made.add_argument("--tiny", action="store_true", help="take seconds, and measure nothing")
    is_tiny = "--tiny" in sys.argv
    for name, size in ({"repeats": (5, 1), "rows": (0, 0)} | sizes).items():
        option = f"--{name.replace('_', '-')}"
        text = f"{MEANINGS.get(name, '')} (default {size[0]:,}, tiny {size[1]:,})" if any(size) else ""
        made.add_argument(
            option, type=cli.positive_int, default=size[is_tiny], metavar="N", help=text.strip()
        )
    root = DEFAULT_ROOT + ("-tiny" if is_tiny else "")
    made.add_argument(
        "--root", default=root, metavar="DIR", help="results of examples/flights/etl.py; made if missing"
    )
    return made


def parse(description: str | None, **sizes: Size) -> argparse.Namespace:
    """Parses the options of a benchmark that needs only its sizes."""
    return parser(description, **sizes).parse_args()


def flights_root(options: argparse.Namespace) -> Path:
    """Returns the results of examples/flights/etl.py below `--root`, with encoded shards; makes missing ones.

    A later run of the job would leave old shards there, so they must be newer than its results.
    """
    import encoded_flights

    from ringspark.jobs import cli

    root = Path(options.root).resolve()
    # The manifest is written last, so its presence means that all files are complete.
    files = [root / name for name in ("train", "test", "shards/manifest.json")]
    times = [file.stat().st_mtime if file.exists() else 0.0 for file in files]
    if not 0 < min(times) <= max(times) <= times[-1]:
        few = ["--fraction", TINY_FRACTION] if options.tiny else []
        subprocess.run([sys.executable, str(FLIGHTS / "etl.py"), "--output", str(root), *few], check=True)
        with cli.spark("ringspark bench flights", MASTER) as spark:
            encoded_flights.write(spark, root)
    return root


def seconds_of(function: Callable[[], object]) -> float:
    """Returns the wall time of one call, in seconds."""
    start = time.perf_counter()
    function()
    return time.perf_counter() - start


def measure_in_turns(
    cases: Mapping[str, Callable[[], float]], repeats: int, *, warm_ups: int = 1
) -> dict[str, list[float]]:
    """Calls every case once per round, and drops the results of the first `warm_ups` rounds."""
    results: dict[str, list[float]] = {name: [] for name in cases}
    for number in range(warm_ups + repeats):
        for name, case in cases.items():
            value = case()
            if number >= warm_ups:
                results[name].append(value)
    return results


def median_ratio(values: Sequence[float], reference: Sequence[float]) -> float:
    """Returns the median over the rounds of value / reference."""
    return median(value / base for value, base in zip(values, reference, strict=True))


def rate_rows(rates: Mapping[str, Sequence[float]], reference: str) -> list[list[str]]:
    """Returns a line per case: name, median, lowest and highest rate, and the ratio to `reference`."""
    return [
        [
            name,
            *(f"{value:,.0f}" for value in (median(values), min(values), max(values))),
            f"{median_ratio(values, rates[reference]):.2f}",
        ]
        for name, values in rates.items()
    ]


def print_table(title: str, header: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
    """Prints an aligned table, then the machine. The first column is left-aligned."""
    widths = [max(len(line[i]) for line in [header, *rows]) for i in range(len(header))]
    print(f"\n{title}")
    for line in [header, ["-" * width for width in widths], *rows]:
        first, *others = (text.ljust(width) for text, width in zip(line[:1], widths[:1], strict=True))
        others = [text.rjust(width) for text, width in zip(line[1:], widths[1:], strict=True)]
        print("  ".join([first, *others]).rstrip())
    print(machine(), flush=True)


def machine() -> str:
    """Returns cores, versions and load of the machine. Results of a loaded machine are unreliable."""
    load = os.getloadavg()[0]
    try:
        spark = f"pyspark {version('pyspark')}"
    except PackageNotFoundError:
        spark = "no pyspark"
    return f"{os.cpu_count()} cores, load average {load:.1f}, torch {version('torch')}, {spark}"


def random_frame(spark: SparkSession, rows: int, *, seed: int = 0) -> DataFrame:
    """Returns a lazy DataFrame of `features`, arrays of `DIM` fp32 values, and a dependent `label`."""
    from pyspark.sql import functions as F

    values = [F.rand(seed + i).cast("float") for i in range(DIM)]
    frame = spark.range(0, rows, 1, NUM_WORKERS).select(F.array(*values).alias("features"))
    label = F.col("features")[0] - F.col("features")[1] * F.col("features")[2]
    return frame.select("features", label.cast("float").alias("label"))
