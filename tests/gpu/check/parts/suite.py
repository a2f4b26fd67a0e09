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

_FOLDER = Path(__file__).resolve().parents[2]
_OUTCOME = re.compile(r"^\S+::(.*?) (PASSED|FAILED|ERROR|SKIPPED|XFAIL)\b", re.MULTILINE)
# The last seconds are for the report of the tests that have run.
_REPORT_SECONDS = 5.0
# A new version of torch may warn, and in this project's tests warnings are errors.
_OPTIONS = ["-v", "--color=no", "-p", "no:cacheprovider", "-W", "ignore"]
# With --tiny: a network, an optimizer and a training.
_FEW = "(mlp and outputs) or adamw8bit or (plain and training)"


class Suite(Part):
    columns = ("passed", "failed", "skipped")
    note = (
        "`pytest tests/gpu`. On the CPU (`RINGSPARK_TEST_DEVICE=cpu`) the tests compare the CPU with itself; "
        "tests that need a GPU are skipped."
    )
    _seconds_used = 0.0

    def cases(self) -> Sequence[str]:
        return [path.name for path in sorted(_FOLDER.glob("test_*.py"))]

    def measure(self, case: str) -> Sequence[Value]:
        began = time.monotonic()
        code, text = self._run(case)
        self._seconds_used += time.monotonic() - began
        print(text[-8000:], flush=True)  # the last lines reach the page if this part fails
        outcomes = _OUTCOME.findall(text)
        counts = Counter(outcome for _, outcome in outcomes)
        bad = [name for name, outcome in outcomes if outcome in ("FAILED", "ERROR")]
        last = ["no output", *(line for line in text.splitlines() if line.strip())][-1]
        if code is None:
            # The last line names the test that has begun and not ended.
            reason = f"{counts['PASSED']} passed, then the time was over in {last.split('::', 1)[-1].strip()}"
            raise SkippedError(reason) if self.setup.is_cut and not bad else TimeoutError(reason)
        if code not in (0, 1, 5) or bad:
            first = f"the first is {bad[0]}" if bad else f"pytest ended with {code}: {last.strip('= ')[:300]}"
            raise AssertionError(f"{counts['PASSED']} passed, {len(bad)} failed; {first}")
        return [counts["PASSED"], len(bad), counts["SKIPPED"]]

    def _run(self, case: str) -> tuple[int | None, str]:
        """Returns the exit code of pytest, None if the time was over, and its output."""
        device = {} if self.setup.on_gpu else {"RINGSPARK_TEST_DEVICE": "cpu"}
        few = ["-k", _FEW] if self.setup.is_short else []
        command = [sys.executable, "-m", "pytest", str(_FOLDER / case), *_OPTIONS, *few]
        log = self.setup.folder / f"{case}.txt"
        with log.open("w") as output:
            process = subprocess.Popen(
                command, cwd=_FOLDER, env=os.environ | device, stdout=output, stderr=subprocess.STDOUT
            )
            code: int | None = None
            try:
                code = process.wait(max(1.0, self.setup.seconds - self._seconds_used - _REPORT_SECONDS))
            except subprocess.TimeoutExpired:
                process.kill()
        return code, log.read_text(errors="replace")
