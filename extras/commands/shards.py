"""The command `ringspark shards`, for shards, shard caches, and runs that `fit` left behind.

The command does not start Spark, so a path without a scheme is on this machine.
"""

from __future__ import annotations

import argparse

from ringspark.estimators.training.settings.byte_sizes import show_bytes
from ringspark.jobs import cli

DESCRIPTION = "Show, verify and remove shards, shard caches, and runs that fit left behind."


def add_arguments(parser: argparse.ArgumentParser) -> None:
    commands = parser.add_subparsers(
        dest="what", required=True, metavar="COMMAND", parser_class=cli.JobParser
    )
    for command, argument, what in (
        ("list", "root", "show the entries of a cache"),
        ("describe", "uri", "show splits, columns and ranges of shards"),
        ("verify", "uri", "check that every file exists and has the rows that the manifest lists"),
        (
            "runs",
            "root",
            "show runs that calls of fit left behind: state, epochs, last change, size",
        ),
        ("remove", "root", "remove the entries of a cache with a key, or all"),
    ):
        added = commands.add_parser(command, help=what, description=f"{what[0].upper()}{what[1:]}.")
        added.add_argument(argument, metavar=argument.upper(), help="folder or URI")
        if command == "runs":
            added.add_argument(
                "--remove-older-than",
                type=float,
                metavar="HOURS",
                help="remove runs without a driver that have not changed for N hours, at least 1",
            )
            added.add_argument(
                "--finished", action="store_true", help="remove finished runs too, whose models are saved"
            )
    chosen = added.add_mutually_exclusive_group(required=True)
    chosen.add_argument("key", nargs="?", metavar="KEY", help="key of the entries, as given to cached_shards")
    chosen.add_argument("--all", action="store_true", help="remove all entries; other files stay")


def run(args: argparse.Namespace) -> None:
    # Late, because `--help` needs no storage client.
    from ringspark.extras.commands.runs import print_folders
    from ringspark.extras.runs.listing import list_runs, remove_runs
    from ringspark.pipelines import ShardManifest, remove_cached

    if args.what == "list":
        _list(args.root)
    elif args.what == "runs":
        if args.remove_older_than is None and args.finished:
            raise ValueError("--finished needs --remove-older-than HOURS")
        if args.remove_older_than is None:
            found, what = list_runs(args.root), "found"
        else:
            found = remove_runs(args.root, args.remove_older_than, finished=args.finished)
            what = "removed"
        print_folders(found)
        total = show_bytes(sum(run.num_bytes for run in found))
        print(f"shards: {len(found)} runs and shards, {total} {what} in {args.root}")
    elif args.what == "remove":
        freed = remove_cached(args.root, None if args.all else args.key)
        print(f"shards: {show_bytes(freed)} freed in {args.root}")
    else:
        manifest = ShardManifest.load(args.uri)
        if args.what == "describe":
            print(manifest.describe())
        else:
            manifest.verify()
            print(f"shards: {manifest.num_rows:,} rows in {len(manifest.files)} files, all there")


def _list(root: str) -> None:
    from ringspark.pipelines import list_cached

    entries = list_cached(root)
    for entry in entries:
        print(f"{entry.key}  {entry.created or 'unfinished'}  {entry.rows:,} rows  ", end="")
        print(f"{show_bytes(entry.num_bytes)}  {', '.join(entry.columns)}")
        print(f"  {entry.uri}")
    total = sum(entry.num_bytes for entry in entries)
    print(f"shards: {len(entries)} entries, {show_bytes(total)} in {root}")
