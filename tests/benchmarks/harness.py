"""What the benchmarks share: options, interleaved rounds, data, tables.

Invariant: what a table compares was measured in one run, in turns (A B C, A B C, ...), so that a
machine which gets slower or faster meanwhile does so for all of them. A ratio is the median of the
rounds' ratios, not the ratio of two medians.
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

from ringspark.jobs import cli
from ringspark.models import ModelSpec

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

# What tests and benchmarks share; pytest finds it by itself.
sys.path += [str(Path(__file__).resolve().parents[1] / name) for name in ("support", "faults", "hosts")]

JOBS = Path(__file__).resolve().parents[2] / "jobs"
TINY_FRACTION = "0.02"  # of the flights
MEANINGS = {"repeats": "measured rounds", "rows": "rows of data"}
MASTER = "local[2]"
NUM_WORKERS = 2
DIM = 32
MLP = ModelSpec("mlp", {"in_features": DIM, "hidden": [128, 128], "out_features": 1})


Size = tuple[int, int]  # as it is measured, and with --tiny


def parser(description: str | None, **sizes: Size) -> argparse.ArgumentParser:
    """The command line of one benchmark: the options of all of them, and its own sizes.

    Every size is an option: `epochs=(30, 1)` makes `--epochs`, which is 30 without it and 1 with `--tiny`.
    All benchmarks take the same options, so that one command line can run them all; what a benchmark has no
    use for, it ignores.
    """
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
    root = cli.DEFAULT_ROOT + ("-tiny" if is_tiny else "")
    made.add_argument("--root", default=root, metavar="DIR", help="folder of jobs/etl.py; made if missing")
    made.add_argument("--chart", metavar="PNG", help="file to draw to, for those that draw; needs matplotlib")
    return made


def parse(description: str | None, **sizes: Size) -> argparse.Namespace:
    """The options of one benchmark that needs none beside its sizes."""
    return parser(description, **sizes).parse_args()


def flights_root(options: argparse.Namespace) -> Path:
    """The results of jobs/etl.py below `--root`; it runs once where they are missing."""
    root = Path(options.root).resolve()
    # The manifest comes last: where it is, the rest is too.
    if not (root / "shards" / "manifest.json").exists():
        few = ["--fraction", TINY_FRACTION] if options.tiny else []
        subprocess.run([sys.executable, str(JOBS / "etl.py"), "--output", str(root), *few], check=True)
    return root


def seconds_of(function: Callable[[], object]) -> float:
    """Wall time of one call."""
    start = time.perf_counter()
    function()
    return time.perf_counter() - start


def measure_in_turns(
    cases: Mapping[str, Callable[[], float]], repeats: int, *, warm_ups: int = 1
) -> dict[str, list[float]]:
    """Calls every case once a round, and keeps what it returns but for the first `warm_ups` rounds."""
    results: dict[str, list[float]] = {name: [] for name in cases}
    for number in range(warm_ups + repeats):
        for name, case in cases.items():
            value = case()
            if number >= warm_ups:
                results[name].append(value)
    return results


def median_ratio(values: Sequence[float], reference: Sequence[float]) -> float:
    """Median over the rounds of value / reference."""
    return median(value / base for value, base in zip(values, reference, strict=True))


def rate_rows(rates: Mapping[str, Sequence[float]], reference: str) -> list[list[str]]:
    """One line a case: name, median, lowest and highest rate, and the ratio to `reference`."""
    return [
        [
            name,
            *(f"{value:,.0f}" for value in (median(values), min(values), max(values))),
            f"{median_ratio(values, rates[reference]):.2f}",
        ]
        for name, values in rates.items()
    ]


def print_table(title: str, header: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
    """Prints aligned text: the first column to the left, the others to the right; the machine last."""
    widths = [max(len(line[i]) for line in [header, *rows]) for i in range(len(header))]
    print(f"\n{title}")
    for line in [header, ["-" * width for width in widths], *rows]:
        first, *others = (text.ljust(width) for text, width in zip(line[:1], widths[:1], strict=True))
        others = [text.rjust(width) for text, width in zip(line[1:], widths[1:], strict=True)]
        print("  ".join([first, *others]).rstrip())
    print(machine(), flush=True)


def machine() -> str:
    """Cores, versions, and how busy the machine is: numbers of a loaded one say little."""
    load = os.getloadavg()[0]
    try:
        spark = f"pyspark {version('pyspark')}"
    except PackageNotFoundError:
        spark = "no pyspark"
    return f"{os.cpu_count()} cores, load average {load:.1f}, torch {version('torch')}, {spark}"


def random_frame(spark: SparkSession, rows: int, *, seed: int = 0) -> DataFrame:
    """`features`, an array of `DIM` fp32 values, and `label`, a fp32 function of them; lazy."""
    from pyspark.sql import functions as F

    values = [F.rand(seed + i).cast("float") for i in range(DIM)]
    frame = spark.range(0, rows, 1, NUM_WORKERS).select(F.array(*values).alias("features"))
    label = F.col("features")[0] - F.col("features")[1] * F.col("features")[2]
    return frame.select("features", label.cast("float").alias("label"))
