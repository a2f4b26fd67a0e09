"""Part "tests": the tests in tests/gpu, one process per file."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

from check.part import Part, SkippedError, Value

_OUTCOME = re.compile(r"^(\S+::.*?) (PASSED|FAILED|ERROR|SKIPPED|XFAIL)\b", re.MULTILINE)
# The last seconds are for the report of the tests that have run.
_REPORT_SECONDS = 5.0
# With --tiny: a network, an optimizer and a training.
_FEW = "(mlp and outputs) or adamw8bit or (plain and training)"


class Suite(Part):
    columns = ("passed", "failed", "skipped")
    note = (
        "`pytest tests/gpu`. On the CPU (`RINGSPARK_TEST_DEVICE=cpu`) the tests compare the CPU with itself; "
        "tests that need a GPU are skipped."
    )

    def cases(self) -> Sequence[str]:
        folder = _folder()
        return [path.name for path in sorted(folder.glob("test_*.py"))] or ["tests/gpu"]

    def measure(self, case: str) -> Sequence[Value]:
        path = _folder() / case
        if not path.exists():
            raise SkippedError("the tests are only in a checkout")
        began = time.monotonic()
        environment = dict(os.environ)
        if not self.setup.on_gpu:
            environment["RINGSPARK_TEST_DEVICE"] = "cpu"
        # A new version of torch may warn, and in this project's tests warnings are errors.
        command = [sys.executable, "-m", "pytest", str(path), "-v", "--color=no", "-p", "no:cacheprovider"]
        command += ["-W", "ignore", *(["-k", _FEW] if self.setup.is_short else [])]
        log = self.setup.folder / f"{path.stem}.txt"
        code: int | None = None
        with log.open("w") as output:
            process = subprocess.Popen(
                command, cwd=path.parents[2], env=environment, stdout=output, stderr=subprocess.STDOUT
            )
            try:
                code = process.wait(max(1.0, self.setup.seconds - self._used(began) - _REPORT_SECONDS))
            except subprocess.TimeoutExpired:
                process.kill()
        self._seconds_used = self._used(began)
        text = log.read_text(errors="replace")
        print(text[-8000:], flush=True)  # the last lines reach the page if this part fails
        outcomes = _OUTCOME.findall(text)
        counts = Counter(outcome for _, outcome in outcomes)
        bad = [name.split("::", 1)[1] for name, outcome in outcomes if outcome in ("FAILED", "ERROR")]
        if code is None:
            reason = f"{counts['PASSED']} passed, then the time was over in {_running(text)}"
            raise SkippedError(reason) if self.setup.is_cut and not bad else TimeoutError(reason)
        if code not in (0, 1, 5) or bad:
            first = f"; the first is {bad[0]}" if bad else f"; pytest ended with {code}: {_last_line(text)}"
            raise AssertionError(f"{counts['PASSED']} passed, {len(bad)} failed{first}")
        return [counts["PASSED"], len(bad), counts["SKIPPED"]]

    _seconds_used = 0.0

    def _used(self, began: float) -> float:
        """Returns the seconds that the part's cases have used up to now."""
        return self._seconds_used + time.monotonic() - began


def _folder() -> Path:
    return Path(__file__).resolve().parents[2]


def _running(text: str) -> str:
    """Returns the name of the test that has begun and not ended."""
    last = text.rstrip().splitlines()[-1] if text.strip() else "the start"
    return last.split("::", 1)[-1].strip()


def _last_line(text: str) -> str:
    lines = [line for line in text.splitlines() if line.strip()]
    return lines[-1].strip("= ")[:300] if lines else "no output"
