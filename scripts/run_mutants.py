"""Runs mutation tests: inserts one small bug at a time, and prints the bugs that no test detects.

    make mutants
    make mutants ARGS="--only estimators/parallel --jobs 1"

The bugs are in `tests/mutants/*.toml`, each with the tests that must detect it. mutmut and cosmic-ray do not
fit, because they generate mutations from operators and accept no list of bugs with tests. Also, mutmut
expects each package in a folder of its name, but most packages of `ringspark` lie at the root here.

A mutant is killed if its tests fail or time out. It survives if they pass. The program first checks that each
old text occurs exactly once, and that the tests pass on the unchanged copy.

The exit code is 1 if a mutant survived or could not be judged.
"""

from __future__ import annotations

import argparse
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import tomllib
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from queue import SimpleQueue
from typing import Literal

ROOT = Path(__file__).resolve().parent.parent
TABLES = ROOT / "tests" / "mutants"

Verdict = Literal["killed", "survived", "error"]


@dataclass(frozen=True, kw_only=True)
class Mutant:
    """One bug.

    Attributes:
        claim: A fact about the code that the bug makes false.
        file: Path relative to the root.
        old: Text that occurs exactly once in the file.
        new: Text that replaces it.
        tests: Arguments of pytest: files and node ids.
    """

    claim: str
    file: str
    old: str
    new: str
    tests: tuple[str, ...]

    def apply(self, text: str) -> str:
        """Returns the text of the file with the bug.

        Raises:
            ValueError: The old text does not occur exactly once, or the new one is not Python.
        """
        if (found := text.count(self.old)) != 1:
            raise ValueError(
                f"{self.file}: {self.old!r} must occur once, but occurs {found} times; fix tests/mutants"
            )
        mutated = text.replace(self.old, self.new)
        try:
            compile(mutated, self.file, "exec")
        except SyntaxError as error:
            raise ValueError(
                f"{self.file} with {self.new!r} is not valid Python ({error}); fix tests/mutants"
            ) from None
        return mutated


def read_tables(folder: Path = TABLES) -> list[Mutant]:
    """Returns the mutants of all tables; the name of a table is the file of its mutant."""
    return [
        Mutant(file=file, **entry | {"tests": tuple(entry["tests"])})
        for path in sorted(folder.glob("*.toml"))
        for file, entries in tomllib.loads(path.read_text()).items()
        for entry in entries
    ]


def check(mutants: Sequence[Mutant], root: Path = ROOT) -> None:
    """Raises if a mutant does not fit the tree.

    Raises:
        ValueError: An old text does not occur exactly once, or a test does not exist.
    """
    for mutant in mutants:
        mutant.apply((root / mutant.file).read_text())
        for test in mutant.tests:
            file, _, node = test.partition("::")
            function = f"def {node.partition('[')[0]}(" if node else ""
            if not (root / file).is_file() or function not in (root / file).read_text():
                raise ValueError(f"{test}, for a mutant of {mutant.file}, does not exist; fix tests/mutants")


class Copy:
    """A copy of the tracked and untracked files, without ignored ones; `ringspark` is importable from it."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        listed = ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
        names = subprocess.run(listed, cwd=ROOT, check=True, capture_output=True, text=True).stdout
        for name in filter(None, names.split("\0")):
            if (ROOT / name).is_file():
                (folder / name).parent.mkdir(parents=True, exist_ok=True)
                shutil.copy2(ROOT / name, folder / name)
        path = [str(folder), *filter(None, [os.environ.get("PYTHONPATH")])]
        self._environment = {**os.environ, "PYTHONPATH": os.pathsep.join(path), "OMP_NUM_THREADS": "1"}
        where = "import ringspark.pipelines as p; print(p.__file__)"
        if not self._python("-c", where)[1].startswith(str(folder)):
            raise RuntimeError(f"ringspark is not imported from the copy in {folder}; unset PYTHONPATH")

    def judge(self, mutant: Mutant, timeout_seconds: float) -> tuple[Verdict, str]:
        """Runs a mutant's tests. Returns the verdict and the output."""
        file = self._folder / mutant.file
        text = file.read_text()
        try:
            self._write(file, mutant.apply(text))
            code, output = self.run_tests(mutant.tests, timeout_seconds, "-x")
        finally:
            self._write(file, text)
        verdicts: dict[int | None, Verdict] = {0: "survived", 1: "killed", None: "killed"}
        return verdicts.get(code, "error"), output

    def run_tests(
        self, tests: Sequence[str], timeout_seconds: float | None = None, *options: str
    ) -> tuple[int | None, str]:
        """Runs pytest. Returns its exit code (None after a timeout) and its output."""
        quiet = ("-q", "--no-header", "-p", "no:cacheprovider")
        return self._python("-m", "pytest", *quiet, *options, *tests, timeout_seconds=timeout_seconds)

    def _python(self, *arguments: str, timeout_seconds: float | None = None) -> tuple[int | None, str]:
        with tempfile.TemporaryFile("w+") as output:
            process = subprocess.Popen(
                [sys.executable, *arguments],
                cwd=self._folder,
                env=self._environment,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
            code: int | None
            try:
                code = process.wait(timeout_seconds)
            except subprocess.TimeoutExpired:
                code = None
            finally:
                # Kill the process group, because a broken test may leave ranks and servers.
                with suppress(ProcessLookupError):
                    os.killpg(process.pid, signal.SIGKILL)
                process.wait()
            output.seek(0)
            return code, output.read()

    def _write(self, file: Path, text: str) -> None:
        file.write_text(text)
        # Python compares a file's size and its time in whole seconds with the .pyc. Both may be equal here.
        for compiled in (file.parent / "__pycache__").glob(f"{file.stem}.*.pyc"):
            compiled.unlink()


def run(mutants: Sequence[Mutant], jobs: int, is_checked: bool, timeout_seconds: float) -> int:
    """Judges all mutants and prints them. Returns the exit code."""
    start = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="ringspark-mutants-") as parent:
        copies: SimpleQueue[Copy] = SimpleQueue()
        for number in range(jobs):
            copies.put(Copy(Path(parent) / str(number)))
        if is_checked:
            tests = sorted({test for mutant in mutants for test in mutant.tests})
            copy = copies.get()
            code, output = copy.run_tests(tests, None, "-n", str(jobs), "--dist", "loadfile")
            copies.put(copy)
            if code:
                print(output, "the tests fail without a mutant; see above", sep="\n", file=sys.stderr)
                return 1
            print(f"the tests pass without a mutant, in {time.monotonic() - start:.0f} s", flush=True)

        def judge(mutant: Mutant) -> Verdict:
            copy, begun = copies.get(), time.monotonic()
            try:
                verdict, output = copy.judge(mutant, timeout_seconds)
            finally:
                copies.put(copy)
            seconds = time.monotonic() - begun
            print(f"{verdict:8} {seconds:5.1f} s  {mutant.file}: {mutant.claim}", flush=True)
            if verdict == "error":
                print(output, flush=True)
            return verdict

        with ThreadPoolExecutor(jobs) as pool:
            verdicts = list(pool.map(judge, mutants))
    left = [pair for pair in zip(verdicts, mutants, strict=True) if pair[0] != "killed"]
    for verdict, mutant in left:
        print(f"\n{verdict}: {mutant.claim}\n  {mutant.file}\n- {mutant.old}\n+ {mutant.new}")
    counts = ", ".join(f"{verdicts.count(verdict)} {verdict}" for verdict in ("killed", "survived", "error"))
    print(f"\n{len(mutants)} mutants: {counts}, in {time.monotonic() - start:.0f} s")
    return 1 if left else 0


def main() -> int:
    """Reads the options and runs the mutants."""
    parser = argparse.ArgumentParser(description="Put small bugs into a copy of the tree and run the tests.")
    parser.add_argument("--jobs", type=int, default=2, help="number of processes, each with its own copy (2)")
    parser.add_argument("--only", nargs="+", metavar="TEXT", help="only mutants with TEXT in path or claim")
    parser.add_argument("--unchecked", action="store_true", help="skip the run without a mutant")
    parser.add_argument("--timeout", type=float, default=300, metavar="SECONDS", help="per mutant (300)")
    options = parser.parse_args()
    mutants = read_tables()
    try:
        check(mutants)
    except ValueError as error:
        print(error, file=sys.stderr)
        return 1
    if options.only:
        mutants = [m for m in mutants if any(text in f"{m.file} {m.claim}" for text in options.only)]
    if not mutants:
        print(f"no mutant has {options.only} in its path or claim; see tests/mutants", file=sys.stderr)
        return 1
    return run(mutants, options.jobs, not options.unchecked, options.timeout)


if __name__ == "__main__":
    sys.exit(main())
