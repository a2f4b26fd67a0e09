"""Lists, describes, verifies and removes shards, caches of shards, and runs that fits left behind.

    python -m ringspark.jobs.shards list /data/cache
    python -m ringspark.jobs.shards describe /data/shards
    python -m ringspark.jobs.shards verify /data/shards
    python -m ringspark.jobs.shards remove /data/cache 3f2a
    python -m ringspark.jobs.shards runs /data/storage --remove-older-than 24

A cache is a folder that `cached_shards` writes to; runs are what fits leave in the folder of their runs. The
job starts no Spark: a path without a scheme is this machine's disk.
"""

from __future__ import annotations

import argparse
import sys

from ringspark.estimators.run.stored_runs import StoredRun, list_runs, remove_runs
from ringspark.jobs import cli
from ringspark.pipelines import ShardManifest
from ringspark.pipelines.reuse.cache_entries import KEY_DIGITS, list_cached, remove_cached

_UNITS = ("bytes", "KiB", "MiB", "GiB", "TiB")


def build_parser() -> cli.JobParser:
    """Returns the parser of the job's options."""
    parser = cli.JobParser("shards", "Look at shards, and at caches of them.")
    # The parsers of the commands take none of the job's own arguments, hence the plain class.
    commands = parser.add_subparsers(
        dest="command", required=True, metavar="COMMAND", parser_class=argparse.ArgumentParser
    )
    for command, argument, what in (
        ("list", "root", "the entries of a cache"),
        ("describe", "uri", "splits, columns and ranges of shards"),
        ("verify", "uri", "whether every file is there, with the rows that the manifest says"),
        (
            "runs",
            "root",
            "what fits left in the folder of their runs: hours since the last change, size, state",
        ),
        ("remove", "root", "an entry of a cache, or all"),
    ):
        added = commands.add_parser(command, help=what, description=what, allow_abbrev=False)
        # A wrong option ends in one line, like the job's own refusals.
        added.error = parser.error  # type: ignore[method-assign]
        added.add_argument(argument, metavar=argument.upper(), help="folder or URI")
        if command == "runs":
            added.add_argument(
                "--remove-older-than",
                type=float,
                metavar="HOURS",
                help="remove what lost its driver and has not changed for so many hours, at least 1",
            )
            added.add_argument(
                "--finished", action="store_true", help="remove finished runs too, whose models are saved"
            )
    chosen = added.add_mutually_exclusive_group(required=True)
    chosen.add_argument("key", nargs="?", metavar="KEY", help="key of the entry, or its first digits")
    chosen.add_argument("--all", action="store_true", help="remove all entries; other files stay")
    return parser


def run(args: argparse.Namespace) -> None:
    """Runs one command.

    Raises:
        ValueError: The folder holds no shards, they are damaged, or no entry has the key.
    """
    if args.command == "list":
        _list(args.root)
    elif args.command == "runs":
        if args.remove_older_than is None and args.finished:
            raise ValueError("--finished goes with --remove-older-than HOURS")
        if args.remove_older_than is None:
            _print_runs(args.root, list_runs(args.root), "there")
        else:
            removed = remove_runs(args.root, args.remove_older_than, finished=args.finished)
            _print_runs(args.root, removed, "removed")
    elif args.command == "remove":
        freed = remove_cached(args.root, None if args.all else args.key)
        print(f"shards: {_size(freed)} freed in {args.root}")
    else:
        manifest = ShardManifest.load(args.uri)
        if args.command == "describe":
            print(manifest.describe())
        else:
            manifest.verify()
            print(f"shards: {manifest.num_rows:,} rows in {len(manifest.files)} files, all there")


def _list(root: str) -> None:
    entries = list_cached(root)
    for entry in entries:
        print(f"{entry.key[:KEY_DIGITS]}  {entry.created or 'unfinished'}  {entry.rows:,} rows  ", end="")
        print(f"{_size(entry.num_bytes)}  {', '.join(entry.columns)}")
        print(f"  {entry.uri}\n  {entry.plan}")
    total = sum(entry.num_bytes for entry in entries)
    print(f"shards: {len(entries)} entries, {_size(total)} in {root}")


def _print_runs(root: str, runs: list[StoredRun], what: str) -> None:
    for run in runs:
        print(f"{run.idle_seconds / 3600:8.1f} h  {run.state:10}  {_size(run.num_bytes)}  {run.uri}")
    print(
        f"shards: {len(runs)} runs and shards, {_size(sum(run.num_bytes for run in runs))} {what} in {root}"
    )


def _size(num_bytes: float) -> str:
    for unit in _UNITS[:-1]:
        if num_bytes < 1024:
            return f"{num_bytes:,.0f} bytes" if unit == "bytes" else f"{num_bytes:.1f} {unit}"
        num_bytes /= 1024
    return f"{num_bytes:.1f} {_UNITS[-1]}"


if __name__ == "__main__":
    sys.exit(cli.main(build_parser(), run))
