"""Runs the benchmarks, each in a separate process, and prints their tables.

    python tests/benchmarks/run.py
    python tests/benchmarks/run.py fit_rate transform_rate --repeats 9
    python tests/benchmarks/run.py --tiny
    make bench ARGS="gang_startup"

Every other program of this folder is a benchmark. Options follow the names and go to each benchmark. Without
names all benchmarks run, which takes many hours. Nothing asserts the times, because they depend on the
machine; tests check the numbers that do not.
"""

from __future__ import annotations

import argparse
import ast
import subprocess
import sys
from pathlib import Path

HERE = Path(__file__).resolve().parent
OTHERS = ("harness", "run", "test_benchmarks")


def benchmarks() -> dict[str, str]:
    """Returns name -> first line of the docstring, for every benchmark."""
    programs = {path.stem: path for path in sorted(HERE.glob("*.py")) if path.stem not in OTHERS}
    return {
        name: (ast.get_docstring(ast.parse(path.read_text())) or "").partition("\n")[0]
        for name, path in programs.items()
    }


def main() -> int:
    """Runs the benchmarks of the command line. Returns 1 if any of them failed."""
    known, words = benchmarks(), sys.argv[1:]
    listed = "\n".join(f"  {name:<19} {what}" for name, what in known.items())
    parser = argparse.ArgumentParser(
        usage="%(prog)s [name ...] [options of the benchmarks]",
        epilog=f"benchmarks:\n{listed}\n\n`%(prog)s name --help` prints the options of a benchmark",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    if words in (["-h"], ["--help"]):
        parser.print_help()
        return 0
    first = next((i for i, word in enumerate(words) if word.startswith("-")), len(words))
    names, options = words[:first] or list(known), words[first:]
    if unknown := [name for name in names if name not in known]:
        parser.error(f"unknown benchmark {', '.join(unknown)}; known: {', '.join(known)}")
    failed = [
        name
        for name in names
        if subprocess.run([sys.executable, str(HERE / f"{name}.py"), *options], check=False).returncode
    ]
    if failed:
        print(f"failed: {', '.join(failed)}", file=sys.stderr)
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
