"""Prints the page "Commands", the help of each command of `ringspark`; `make docs` runs it."""

from __future__ import annotations

import argparse
import os

from ringspark.jobs.command import build_parser


def main() -> None:
    os.environ["COLUMNS"] = "110"  # argparse wraps lines at this width
    print("# ringspark.jobs\n\nThe commands of `ringspark`; [jobs](../jobs.md) has examples.")
    commands = next(a for a in build_parser()._actions if isinstance(a, argparse._SubParsersAction))
    for name, parser in commands.choices.items():
        print(f"\n## ringspark {name}\n\n```text\n{parser.format_help()}```")


if __name__ == "__main__":
    main()
