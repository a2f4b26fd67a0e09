"""Keeps what a rank writes to standard error, for when a native library ends its process.

After an abort() in C++, Spark knows only that the Python worker "exited unexpectedly"; what the library said
stands in the executor's log. So while a rank works, its descriptor 2 is a pipe to the witness, a process of
its own, which passes on what comes to where it went before. If the rank's process ends, the witness stores
the last lines where the driver finds them.
"""

from __future__ import annotations

import os
import subprocess
import sys
import time
from contextlib import suppress
from dataclasses import replace
from typing import Any

from ringspark.estimators import run_layout
from ringspark.estimators.failures import LOST, Failure
from ringspark.estimators.launch.heartbeat import Pulse
from ringspark.pipelines import storage

_WITNESS = "ringspark.estimators.launch.witness"
_LINES = 10
# The witness passes on what came before; if nobody reads the executor's log, the rank does not wait for that.
_FAREWELL_SECONDS = 1.0
# The witness imports the store's client before it can write; a host that is gone has none.
_PATIENCE_SECONDS = 10.0


class LastWords:
    """A context manager that keeps this process's standard error. Runs on every rank.

    Without Linux's descriptors of processes, or without room for one more process, it does nothing.
    """

    def __init__(self, pulse: Pulse, rank: int) -> None:
        self._place = _place(pulse, rank)
        self._witness: subprocess.Popen[bytes] | None = None

    def __enter__(self) -> LastWords:
        with suppress(OSError, AttributeError):
            os.close(os.pidfd_open(os.getpid()))
            source, target = os.pipe()
            try:
                self._witness = self._call_witness(source)
                self._before = os.dup(2)
                os.dup2(target, 2)
            finally:
                os.close(source)
                os.close(target)
        return self

    def __exit__(self, *_: Any) -> None:
        if self._witness is not None:
            os.dup2(self._before, 2)
            os.close(self._before)
            # A child of the rank may still write to the pipe: then the witness lives as long as the child.
            with suppress(subprocess.TimeoutExpired):
                self._witness.communicate(b"!", timeout=_FAREWELL_SECONDS)

    def _call_witness(self, source: int) -> subprocess.Popen[bytes]:
        # Modules that Spark has shipped are on this process's path alone.
        path = os.pathsep.join(entry for entry in sys.path if entry)
        return subprocess.Popen(
            [sys.executable, "-m", _WITNESS, str(os.getpid()), str(source), *self._place],
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            pass_fds=[source],
            env=os.environ | {"PYTHONPATH": path},
            start_new_session=True,  # Ctrl-C is for the rank
        )


def with_last_words(failure: Failure, pulse: Pulse) -> Failure:
    """Returns the failure; that of a lost rank with the last lines that it wrote to standard error.

    Runs on the driver, and waits until the witness has stored the lines.
    """
    if failure.type != LOST:
        return failure
    deadline = time.monotonic() + _PATIENCE_SECONDS
    while (lines := _read(pulse, failure.rank)) is None and time.monotonic() < deadline:
        time.sleep(0.1)
    if not lines:
        return failure
    return replace(failure, trace="\n".join(["the last lines of its standard error:", *lines]))


def _place(pulse: Pulse, rank: int) -> tuple[str, str]:
    """Returns the file for the rank's lines, and the first of them."""
    uri = storage.join(pulse.run_uri, run_layout.HEARTBEAT, f"rank-{rank}.stderr")
    return uri, f"{pulse.token} {pulse.launch}"


def _read(pulse: Pulse, rank: int) -> list[str] | None:
    """Returns the lines that a witness has stored in this launch; None if none has."""
    uri, launch = _place(pulse, rank)
    with suppress(Exception):  # whatever the store's client raises, the failure itself matters more
        first, _, text = storage.read_bytes(uri).decode(errors="replace").partition("\n")
        if first == launch:
            return text.splitlines()[-_LINES:]
    return None
