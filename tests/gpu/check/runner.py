"""Runs a part in processes of its own, ends processes that take too long, and collects the results."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Literal

from check.child import BROKEN, add_entry, read_entries
from check.registry import PARTS

ROOT = Path(__file__).resolve().parents[3]

State = Literal["begun", "ok", "failed", "skipped"]

# A killed process that is in a driver call may not end; wait at most this long for it.
_END_SECONDS = 10.0
_LOG_LINES = 30


@dataclass(kw_only=True)
class CaseResult:
    """Result of one case; `values` has one entry per column if the state is "ok"."""

    case: str
    state: State
    seconds: float = 0.0
    values: list[Any] = field(default_factory=list)
    reason: str = ""


@dataclass(kw_only=True)
class PartResult:
    """Results of one part.

    Attributes:
        reason: Why the whole part failed or was skipped.
        log: Last lines of output of a failed part's processes.
    """

    name: str
    title: str
    device: str = ""
    is_tiny: bool = False
    columns: list[str] = field(default_factory=list)
    note: str = ""
    seconds: float = 0.0
    reason: str = ""
    cases: list[CaseResult] = field(default_factory=list)
    is_skipped: bool = False
    log: list[str] = field(default_factory=list)

    @property
    def state(self) -> State:
        if any(case.state == "failed" for case in self.cases) or (self.reason and not self.is_skipped):
            return "failed"
        return "ok" if any(case.state == "ok" for case in self.cases) else "skipped"

    def summary(self) -> str:
        """Returns what happened, in one line."""
        states = [case.state for case in self.cases]
        counts = {state: states.count(state) for state in ("ok", "failed", "skipped")}
        found = ", ".join(f"{count} {state}" for state, count in counts.items() if count)
        bad = [f"{case.case}: {case.reason}" for case in self.cases if case.state == "failed"]
        return "; ".join(text for text in (found, self.reason, *bad[:1]) if text)


def run_part(name: str, folder: Path, *, tiny: bool, device: str | None, seconds: float) -> PartResult:
    """Runs one part for at most `seconds`, or its own limit if that is shorter. Its files go to `folder`."""
    entry, start = PARTS[name], time.monotonic()
    result = PartResult(name=name, title=entry.title)
    if missing := entry.missing():
        result.is_skipped, result.reason = True, f"needs the package {', '.join(missing)}"
        return result
    folder.mkdir(parents=True)
    results, log = folder / "results.jsonl", folder / "log.txt"
    is_cut = seconds < entry.seconds
    limit = min(seconds, entry.seconds)
    given = {"path": entry.path, "results": str(results), "folder": str(folder), "device": device}
    is_over = False
    while not is_over:
        left = limit - (time.monotonic() - start)
        code = _run(json.dumps({**given, "tiny": tiny, "cut": is_cut, "left": left}), log, left)
        is_over = _collect(result, results, code, f"took more than {limit:.0f} s", is_cut, log)
    if result.state == "failed":
        result.log = log.read_text(errors="replace").splitlines()[-_LOG_LINES:]
    result.seconds = time.monotonic() - start
    return result


def _collect(
    result: PartResult, path: Path, code: int | None, too_long: str, is_cut: bool, log: Path
) -> bool:
    """Reads what a process has measured. Returns whether no other process has to run."""
    header, entries = read_entries(path)
    rest = [case for case in header.pop("cases", ()) if case not in entries]
    vars(result).update(header)
    result.cases = [CaseResult(**entry) for entry in entries.values()]
    begun = next((case for case in result.cases if case.state == "begun"), None)
    if code == 0 or (begun is None and header and not rest):
        return True
    why = too_long if code is None else _ending(code, log)
    if begun is not None:
        begun.state, begun.reason = ("skipped" if code is None and is_cut else "failed"), why
        add_entry(path, **asdict(begun))
    elif code != BROKEN:
        # The process ended before its first case.
        result.is_skipped, result.reason = code is None and is_cut, why
    # The cases that are left get a new process, unless no process gets as far as a case.
    if code is not None and not result.reason and rest:
        return False
    skipped = "not measured, because the part ended early"
    result.cases += [CaseResult(case=case, state="skipped", reason=skipped) for case in rest]
    return True


def _environment() -> dict[str, str]:
    """Returns environment variables with which a process imports this ringspark and reports a crash."""
    paths = [str(ROOT), str(ROOT / "tests" / "gpu"), *filter(None, [os.environ.get("PYTHONPATH")])]
    # Variables of a pytest that runs this check must not reach the pytest that it starts.
    kept = {key: value for key, value in os.environ.items() if not key.startswith("PYTEST_")}
    path = {"PYTHONPATH": os.pathsep.join(paths)}
    return {**kept, **path, "PYTHONFAULTHANDLER": "1", "PYTHONUNBUFFERED": "1"}


def _run(words: str, log: Path, seconds: float) -> int | None:
    """Returns the exit code of a process; ends it and returns None if it takes more than `seconds`."""
    # A file and no pipe, because a child that outlives the process would keep a pipe open.
    with log.open("ab") as output:
        process = subprocess.Popen(
            [sys.executable, "-m", "check.child", words],
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            env=_environment(),
            start_new_session=True,
        )
    try:
        return process.wait(max(0.1, seconds))
    except subprocess.TimeoutExpired:
        return None
    finally:
        # Also if the process has ended, because its compilers and tests may still run.
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(process.pid, signal.SIGKILL)
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(_END_SECONDS)


def _ending(code: int, log: Path) -> str:
    if code < 0:
        known = {number.value: number.name for number in signal.Signals}
        return f"the process was ended by {known.get(-code, f'signal {-code}')}"
    lines = [line.strip() for line in log.read_text(errors="replace").splitlines() if line.strip()]
    return f"the process ended with exit code {code}" + (f": {lines[-1][:400]}" if lines else "")
