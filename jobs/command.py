"""The command `ringspark`: trains by a job file, scores rows, shows shards and runs.

    ringspark train job.yaml
    ringspark runs list /data/runs
    spark-submit --py-files dist/ringspark-0.1.0.zip jobs/command.py train job.yaml

Each command is a module with `DESCRIPTION`, `add_arguments(parser)` and `run(args)`. The module imports
neither Spark nor torch, so help and completion are fast.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from importlib import import_module
from importlib.util import find_spec
from typing import Any

import ringspark
from ringspark.jobs import cli

# Commands of `ringspark.extras`, which may be absent; their modules are in `ringspark.extras.commands`.
EXTRA_COMMANDS = (
    *("score", "demo", "check", "plan", "runs", "report", "shards", "pack", "certify", "verify"),
    *("rehearse", "build-horovod"),
)
SHELLS = ("bash", "zsh", "tcsh")
# Exit code for wrong input or options, as in argparse; 1 means a failed training, save or evaluation.
REFUSED = 2
_EPILOG = "ringspark COMMAND --help shows a command's options; docs/jobs.md has examples."


def build_parser() -> cli.JobParser:
    parser = cli.JobParser("ringspark", "Train PyTorch networks on Spark's rows.", epilog=_EPILOG)
    version = f"ringspark {ringspark.__version__}"
    parser.add_argument("--version", action="version", version=version, help="print the version and stop")
    parser.add_argument(
        "--print-completion",
        action=_Completion,
        metavar="SHELL",
        help=f"print a script that completes commands in {', '.join(SHELLS)}, and stop",
    )
    commands = parser.add_subparsers(
        dest="command", required=True, metavar="COMMAND", title="commands", parser_class=cli.JobParser
    )
    paths = {"train": "ringspark.jobs.train_job"}
    if find_spec("ringspark.extras"):
        paths |= {name: f"ringspark.extras.commands.{name.replace('-', '_')}" for name in EXTRA_COMMANDS}
    for name, path in paths.items():
        command = import_module(path)
        first_word, rest = command.DESCRIPTION.rstrip(".").split(" ", 1)
        added = commands.add_parser(
            name, help=f"{first_word.lower()} {rest}", description=command.DESCRIPTION
        )
        command.add_arguments(added)
        added.set_defaults(command_run=command.run, command_prog=added.prog)
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    return cli.main(build_parser(), lambda args: args.command_run(args), argv, refused=REFUSED)


class _Completion(argparse.Action):
    def __init__(self, option_strings: Sequence[str], dest: str, **kwargs: Any) -> None:
        super().__init__(option_strings, argparse.SUPPRESS, default=argparse.SUPPRESS, **kwargs)

    def __call__(self, parser: argparse.ArgumentParser, _: Any, shell: Any, *__: Any) -> None:
        if shell not in SHELLS:
            parser.error(f"argument --print-completion: must be one of {', '.join(SHELLS)}, got {shell!r}")
        try:
            import shtab
        except ImportError:
            parser.error("--print-completion needs the package shtab; pip install 'ringspark[completion]'")
        _complete_files(parser, shtab.FILE)
        print(shtab.complete(parser, shell))
        parser.exit()


def _complete_files(parser: argparse.ArgumentParser, completer: Any) -> None:
    for action in parser._actions:
        if isinstance(action, argparse._SubParsersAction):
            for inner in action.choices.values():
                _complete_files(inner, completer)
        elif action.metavar in ("FILE", "URI", "ROOT"):
            action.complete = completer  # type: ignore[attr-defined]


if __name__ == "__main__":
    sys.exit(main())
