"""Servers that end with the process that starts them, also if it is killed."""

from __future__ import annotations

import ctypes
import signal
import subprocess
from collections.abc import Mapping
from pathlib import Path

_PR_SET_PDEATHSIG = 1


def start_daemon(
    command: list[str], log: Path, *, environment: Mapping[str, str], folder: Path | None = None
) -> subprocess.Popen[bytes]:
    """Starts a server in `folder`; its output is added to `log`. Call it in the main thread."""
    libc = ctypes.CDLL(None)

    def end_with_parent() -> None:
        libc.prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)

    with log.open("ab") as output:
        return subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=output,
            cwd=folder,
            env=environment,
            preexec_fn=end_with_parent,
        )


def end_daemon(process: subprocess.Popen[bytes], number: int = signal.SIGTERM) -> None:
    """Sends a signal, and kills the process if it does not end within 30 s."""
    process.send_signal(number)
    try:
        process.wait(30)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait(30)
