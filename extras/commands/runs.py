"""The command `ringspark runs`: lists, shows and removes run folders.

A path without a scheme is on this machine. `ringspark shards runs` removes the run folders that
`fit` left behind when it had no `runUri`.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING

from ringspark.estimators.training.settings.byte_sizes import show_bytes
from ringspark.jobs import cli

if TYPE_CHECKING:
    from ringspark.extras.report.facts import RunFacts
    from ringspark.extras.runs.listing import ListedRun

DESCRIPTION = "List, show and remove run folders."
_HOUR = 3600.0
_WIDTH = 100


def add_arguments(parser: argparse.ArgumentParser) -> None:
    commands = parser.add_subparsers(
        dest="what", required=True, metavar="COMMAND", title="commands", parser_class=cli.JobParser
    )
    for name, what, title in (
        ("list", "list the runs in a folder, the newest last", "folder that contains run folders"),
        ("show", "show settings, epochs and faults of a run", "run folder"),
        ("remove", "remove a run, its checkpoints and weights", "run folder"),
    ):
        sentence = f"{what[0].upper()}{what[1:]}."
        added = commands.add_parser(name, help=what, description=sentence)
        added.add_argument("uri", metavar="URI", help=title)
        if name == "show":
            added.add_argument("--all", action="store_true", help="show all settings, and long ones whole")
            added.add_argument("--logs", action="store_true", help="show the workers' output too")
        if name == "remove":
            added.add_argument("--yes", action="store_true", help="remove without asking")
            added.add_argument(
                "--stopped",
                action="store_true",
                help="declare that the driver of this unfinished run has ended, even if its files are new",
            )
        added.set_defaults(command_prog=added.prog)


def run(args: argparse.Namespace) -> None:
    if args.what == "list":
        _list(args.uri)
    elif args.what == "show":
        _show(args.uri, everything=args.all, logs=args.logs)
    else:
        _remove(args.uri, yes=args.yes, stopped=args.stopped)


def _list(uri: str) -> None:
    from ringspark.extras.runs.listing import list_run_folders

    found = list_run_folders(uri)
    print_folders(found)
    print(f"runs: {len(found)} in {uri}")


def print_folders(found: Sequence[ListedRun]) -> None:
    """Prints one line per folder: name, state, epochs, time since the last change, size."""
    width = max((len(run.name) for run in found), default=0)
    for run in found:
        epochs = f"{run.epochs} epochs" if run.epochs != 1 else "1 epoch"
        print(
            f"{run.name:{width}}  {run.state:10}  {epochs:>10}  {_ago(run):>12}  {show_bytes(run.num_bytes)}"
        )


def _ago(run: ListedRun) -> str:
    hours = run.idle_seconds / _HOUR
    if hours < 1:
        return f"{run.idle_seconds / 60:.0f} min ago"
    return f"{hours:.0f} h ago" if hours < 48 else f"{hours / 24:.0f} days ago"


def _show(uri: str, *, everything: bool, logs: bool) -> None:
    from ringspark.extras.report.facts import read_run
    from ringspark.extras.runs.listing import inspect_run

    listed, facts = inspect_run(uri), read_run(uri)
    print(f"run      {listed.uri}")
    print(f"state    {listed.state}, last change {_ago(listed)}, {show_bytes(listed.num_bytes)}")
    if facts.outcome is not None:
        outcome = facts.outcome
        print(f"trained  {outcome.rows:,} rows in {outcome.steps:,} steps and {outcome.seconds:.1f} s")
        print(f"model    of epoch {outcome.model_epoch}")
        if outcome.stop_reason is not None:
            print(f"stopped  {outcome.stop_reason}")
    elif facts.progress is not None:
        now = facts.progress
        print(f"at       step {now.step:,} of {now.num_steps:,}, epoch {now.epoch} of {now.epochs}")
    _show_settings(facts, everything)
    _show_epochs(facts)
    _print_lines("faults", _list_faults(facts))
    if logs:
        from ringspark.estimators.training import rank_log

        _print_lines("logs", rank_log.read_lines(listed.uri))


def _show_settings(facts: RunFacts, everything: bool) -> None:
    from ringspark.estimators.training.settings.table import SETTINGS

    if facts.config is None:
        return
    print("settings" if everything else "settings that differ from the defaults")
    for name, setting in sorted(SETTINGS.items()):
        if setting.field and hasattr(facts.config, setting.field):
            value = getattr(facts.config, setting.field)
            if everything or value != setting.default:
                text = _cell(value)
                is_cut = len(text) > _WIDTH and not everything
                print(f"  {name} = {text[:_WIDTH] + ' ...' if is_cut else text}")


def _show_epochs(facts: RunFacts) -> None:
    from ringspark.pipelines.notebook_table import align_table

    if not facts.history:
        return
    rows = [record.row() for record in facts.history]
    # A column without values is hidden. A metric that is always 0 is shown; these counts are not.
    dull = {"skipped_steps": (None, 0), "bytes_sent": (None, 0)}
    names = [name for name in rows[0] if any(row.get(name) not in dull.get(name, (None,)) for row in rows)]
    table = align_table(names, [[_cell(row.get(name)) for name in names] for row in rows])
    _print_lines("epochs", table.splitlines())


def _print_lines(title: str, lines: Sequence[str]) -> None:
    print(title if lines else f"{title}: none")
    for line in lines:
        print(f"  {line}")


def _list_faults(facts: RunFacts) -> list[str]:
    from ringspark.extras.report.facts import failure_of

    faults = [*facts.problems]
    faults += [
        f"rank {beat.rank} on {beat.host}: {failure_of(beat)}" for beat in facts.heartbeats if beat.failure
    ]
    if facts.outcome is not None:
        faults += [f"started again: {reason}" for reason in facts.outcome.restart_reasons]
        faults += [f"resumed from step {step}" for step in facts.outcome.resumed_steps]
        faults += [*facts.outcome.checkpoint_errors, *facts.outcome.non_finite]
    elif len(facts.environment.starts) > 1:
        faults.append(f"started {len(facts.environment.starts)} times")
    return faults


def _cell(value: object) -> str:
    if value is None:
        return "-"
    return f"{value:.6g}" if isinstance(value, float) else str(value)


def _remove(uri: str, *, yes: bool, stopped: bool) -> None:
    from ringspark.extras.runs.listing import inspect_run, remove_run

    run = inspect_run(uri)
    if not yes:
        if not sys.stdin.isatty():
            raise ValueError(f"{run.uri} is not removed without confirmation; give --yes")
        loss = "its weights are only in saved models" if run.state == "finished" else "it cannot be resumed"
        answer = input(f"Remove {run.uri}, {run.state}, {show_bytes(run.num_bytes)}? Then {loss}. [y/N] ")
        if answer.strip().lower() not in ("y", "yes"):
            print("runs: nothing removed")
            return
    run = remove_run(uri, stopped=stopped)
    print(f"runs: {show_bytes(run.num_bytes)} freed, {run.uri} removed")
