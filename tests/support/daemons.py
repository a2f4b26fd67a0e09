"""Servers that end with the process that starts them, also if it is killed."""

from __future__ import annotations

import signal
import subprocess
import sys
from collections.abc import Mapping
from functools import cache
from pathlib import Path

# Ends the processes whose ids it has read, when its input ends. A pidfd cannot mean another process.
_WATCHER = """
import contextlib, os, signal, sys
found = []
for line in sys.stdin:
    with contextlib.suppress(ProcessLookupError):
        found.append(os.pidfd_open(int(line)))
for one in found:
    with contextlib.suppress(ProcessLookupError):
        signal.pidfd_send_signal(one, signal.SIGTERM)
"""


@cache
def _watcher() -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-S", "-c", _WATCHER], stdin=subprocess.PIPE, text=True, start_new_session=True
    )


def start_daemon(
    command: list[str], log: Path, *, environment: Mapping[str, str], folder: Path | None = None
) -> subprocess.Popen[bytes]:
    """Starts a server in `folder`; its output is added to `log`."""
    with log.open("ab") as output:
        process = subprocess.Popen(
            command, stdin=subprocess.DEVNULL, stdout=output, stderr=output, cwd=folder, env=environment
        )
    if (pipe := _watcher().stdin) is not None:
        pipe.write(f"{process.pid}\n")
        pipe.flush()
    return process


def end_daemon(process: subprocess.Popen[bytes], number: int = signal.SIGTERM) -> None:
    """Sends a signal, and kills the process if it does not end within 30 s."""
    process.send_signal(number)
    try:
        process.wait(30)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait(30)
