"""Keeps what a rank writes to standard error, for when a native library ends its process.

After an abort() in C++, Spark knows only that the Python worker "exited unexpectedly"; what the library said
stands in the executor's log. So while a rank works, its descriptor 2 is a file in memory, and a thread passes
on what comes to where it went before. A pipe would block the rank if nobody read it; a file does not. The
witness, a process of its own, waits for the rank's end, then passes on the rest and stores the last lines
where the driver finds them. It is killed when the rank's work ends in order.
"""

from __future__ import annotations

import ctypes
import faulthandler
import os
import subprocess
import sys
import threading
import time
from contextlib import ExitStack, suppress
from dataclasses import replace
from typing import Any

from ringspark.estimators import run_layout
from ringspark.estimators.failures import LOST, Failure
from ringspark.estimators.launch.heartbeat import Pulse
from ringspark.estimators.launch.witness import HEAD_BYTES, KEPT_BYTES
from ringspark.pipelines import storage

_WITNESS = "ringspark.estimators.launch.witness"
# How many bytes that were passed on may take memory.
_SPARE_BYTES = 1 << 20
# FALLOC_FL_PUNCH_HOLE with FALLOC_FL_KEEP_SIZE, which Python does not have.
_PUNCH_HOLE = 3
_PASS_ON_SECONDS = 0.25
_LINES = 10
# The witness imports the store's client before it can write; a host that is gone has none.
_PATIENCE_SECONDS = 10.0


class LastWords:
    """A context manager that keeps this process's standard error. Runs on every rank.

    Without Linux's files in memory, or without room for one more process, it does nothing.
    """

    def __init__(self, pulse: Pulse, rank: int) -> None:
        self._pulse, self._rank = pulse, rank
        self._undo = ExitStack()
        self._done = threading.Event()
        self._thread = threading.Thread(target=self._pass_on, name="ringspark-stderr", daemon=True)

    def __enter__(self) -> LastWords:
        with suppress(OSError, AttributeError), ExitStack() as undo:
            self._file = os.memfd_create("ringspark-stderr")
            undo.callback(os.close, self._file)
            os.write(self._file, bytes(HEAD_BYTES))
            self._before = os.dup(2)
            undo.callback(os.close, self._before)
            end = os.open(f"/proc/self/fd/{self._file}", os.O_WRONLY | os.O_APPEND)
            undo.callback(os.close, end)
            self._call_witness(undo)
            os.dup2(end, 2)
            undo.callback(os.dup2, self._before, 2)
            if not faulthandler.is_enabled():
                # Says which Python code had called the library. All threads would be too many lines.
                faulthandler.enable(2, all_threads=False)
                undo.callback(faulthandler.disable)
            self._thread.start()
            self._undo = undo.pop_all()
        return self

    def __exit__(self, *_: Any) -> None:
        self._undo.close()

    def _call_witness(self, undo: ExitStack) -> None:
        # Modules that Spark has shipped are on this process's path alone.
        path = os.pathsep.join(entry for entry in sys.path if entry)
        witness = subprocess.Popen(
            [sys.executable, "-m", _WITNESS, str(self._file), *_place(self._pulse, self._rank)],
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            pass_fds=[self._file],
            env=os.environ | {"PYTHONPATH": path},
        )
        undo.callback(witness.communicate)
        undo.callback(witness.kill)
        undo.callback(self._end_thread)

    def _end_thread(self) -> None:
        self._done.set()
        if self._thread.ident is not None:
            self._thread.join()

    def _pass_on(self) -> None:
        passed, freed, is_done = 0, 0, False
        while not is_done:
            is_done = self._done.wait(_PASS_ON_SECONDS)
            while data := os.pread(self._file, KEPT_BYTES, HEAD_BYTES + passed):
                # Nobody may listen any more, and that must not end a training.
                with suppress(OSError):
                    os.write(self._before, data)
                passed += len(data)
                os.pwrite(self._file, passed.to_bytes(HEAD_BYTES, "little"), 0)
            if passed > freed + _SPARE_BYTES:
                # A hole: the file's length stays, so that a line that comes just now is not lost.
                freed = passed - KEPT_BYTES
                libc = ctypes.CDLL(None)
                libc.fallocate(self._file, _PUNCH_HOLE, ctypes.c_long(HEAD_BYTES), ctypes.c_long(freed))


def with_last_words(failures: list[Failure], pulse: Pulse) -> list[Failure]:
    """Returns the failures; those of lost ranks with the last lines that they wrote to standard error.

    Runs on the driver, and waits until the witnesses have stored the lines.
    """
    deadline = time.monotonic() + _PATIENCE_SECONDS
    heard = []
    for failure in failures:
        lines: list[str] | None = []
        if failure.type == LOST:
            while (lines := _read(pulse, failure.rank)) is None and time.monotonic() < deadline:
                time.sleep(0.1)
        if lines:
            said = "\n".join(["the last lines of its standard error:", *lines])
            failure = replace(failure, trace=said)
        heard.append(failure)
    return heard


def _place(pulse: Pulse, rank: int) -> tuple[str, str]:
    """Returns the file for the rank's lines, and the first of them, which tells it from other launches'."""
    uri = storage.join(pulse.run_uri, run_layout.HEARTBEAT, f"rank-{rank}.stderr")
    return uri, f"{pulse.token} {pulse.launch}"


def _read(pulse: Pulse, rank: int) -> list[str] | None:
    """Returns the lines that a witness has stored in this launch; None if none has."""
    uri, launch = _place(pulse, rank)
    try:
        first, _, text = storage.read_bytes(uri).decode(errors="replace").partition("\n")
    except OSError:
        return None
    if first != launch:
        return None
    lines = text.splitlines()
    # The library speaks before Python says where it was called from, the innermost call first.
    crash = next((i for i, line in enumerate(lines) if line.startswith("Fatal Python error")), len(lines))
    return lines[max(0, crash - _LINES) : crash + _LINES]
