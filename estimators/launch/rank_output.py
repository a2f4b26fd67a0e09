"""Keeps what a rank prints, in the run's folder and for the driver's error, however the rank ends.

While a rank works, its descriptors 1 and 2 are pipes to the witness, a process of its own, which passes on
what comes to where it went before, such as the executor's log, and keeps the first and the last part. The
descriptors and not `sys.stdout` are replaced, because native libraries and child processes know only those:
what Gloo or CUDA says before an abort() would otherwise stand in the executor's log alone. Spark's daemon
has told its port by standard output long before a task begins.

A thread of the rank asks the witness about once a second, and writes what is new into the run's folder. If
the rank's process dies, the witness writes it, and then a file that tells the driver not to wait.
"""

from __future__ import annotations

import ctypes
import os
import selectors
import subprocess
import sys
import threading
import time
from contextlib import ExitStack, suppress
from dataclasses import replace
from typing import IO, Any

from ringspark.estimators.failures import LOST, Failure
from ringspark.estimators.launch.heartbeat import Pulse
from ringspark.estimators.launch.witness import LENGTH_BYTES, READ_BYTES, write_all
from ringspark.estimators.training import rank_log
from ringspark.pipelines import storage

_WITNESS = "ringspark.estimators.launch.witness"
_STORE_SECONDS = 1.0
# A remote store is not asked to take the whole file every second.
_REMOTE_STORE_SECONDS = 5.0
# The witness passes on what came before; if nobody reads the executor's log, the rank does not wait for that.
_FAREWELL_SECONDS = 1.0
# A store that does not answer must not hold back the result.
_LAST_STORE_SECONDS = 5.0
# The witness imports the store's client before it can write; a host that is gone has none.
_PATIENCE_SECONDS = 10.0
# Ranks that start again write into the same file, so they wait for it, but not long for a host that is gone.
_RESTART_PATIENCE_SECONDS = 3.0


class RankOutput:
    """A context manager that keeps this process's standard output and standard error. Runs on every rank.

    Without Linux's descriptors of processes, or without room for one more process, it does nothing.
    """

    def __init__(self, pulse: Pulse, rank: int, host: str) -> None:
        self._pulse, self._rank = pulse, rank
        self._start = rank_log.name_start(pulse.token, pulse.launch)
        self._line = rank_log.format_start(rank, host, os.getpid(), self._start)
        self._witness: subprocess.Popen[bytes] | None = None
        # What the descriptors were before; empty once they are so again.
        self._before: dict[int, int] = {}
        # Read end of each pipe -> descriptor that the pipe replaces. While this process holds the read ends,
        # a print does not fail even if the witness is killed.
        self._sources: dict[int, int] = {}
        self._restoring = threading.Lock()
        self._done, self._is_told = threading.Event(), threading.Event()

    def __enter__(self) -> RankOutput:
        # Without room for a pipe, a process or a thread, the output goes where it went before.
        with suppress(OSError, AttributeError, RuntimeError), ExitStack() as opened:
            os.close(os.pidfd_open(os.getpid()))
            ends: list[int] = []
            for _ in ("output", "error", "answers"):
                ends += os.pipe()
                for end in ends[-2:]:
                    opened.callback(os.close, end)
            out, out_target, err, err_target, answers, answers_target = ends
            kept = [os.dup(descriptor) for descriptor in (1, 2, out, err)]
            witness = self._call_witness(out, err, answers_target)
            # If the thread finds the witness dead, it waits with restoring until everything is set up.
            opened.enter_context(self._restoring)
            self._thread = threading.Thread(
                target=self._run,
                args=(witness, os.fdopen(os.dup(answers), "rb")),
                name="ringspark-rank-log",
                daemon=True,
            )
            self._thread.start()
            _flush()
            # From here on nothing fails.
            self._before, self._sources = {1: kept[0], 2: kept[1]}, {kept[2]: 1, kept[3]: 2}
            os.dup2(out_target, 1)
            os.dup2(err_target, 2)
            self._witness = witness
            # A pipe is written to when its buffer is full, which may be never.
            self._set_line_buffering(True)
        return self

    def __exit__(self, *_: Any) -> None:
        if self._witness is None:
            return
        _flush()
        self._set_line_buffering(False)
        self._restore()
        self._done.set()
        if self._is_told.wait(_FAREWELL_SECONDS):
            self._thread.join(_LAST_STORE_SECONDS)
        # A child of the rank may still write to the pipes: then the witness lives as long as the child.
        with suppress(subprocess.TimeoutExpired):
            self._witness.wait(_FAREWELL_SECONDS)

    def _restore(self) -> None:
        with self._restoring:
            for descriptor, before in self._before.items():
                os.dup2(before, descriptor)
                os.close(before)
            self._before = {}

    def _call_witness(self, *descriptors: int) -> subprocess.Popen[bytes]:
        # Modules that Spark has shipped are on this process's path alone.
        path = os.pathsep.join(entry for entry in sys.path if entry)
        told = [os.getpid(), *descriptors, self._pulse.run_uri, self._rank, self._start, self._line]
        return subprocess.Popen(
            [sys.executable, "-m", _WITNESS, *map(str, told)],
            stdin=subprocess.PIPE,
            pass_fds=descriptors,
            env=os.environ | {"PYTHONPATH": path},
            start_new_session=True,  # Ctrl-C is for the rank
        )

    def _set_line_buffering(self, value: bool) -> None:
        # The user may have put another object there.
        with suppress(AttributeError, ValueError, OSError):
            if value:
                self._was_line_buffered = sys.stdout.line_buffering
            sys.stdout.reconfigure(line_buffering=value or self._was_line_buffered)  # type: ignore[union-attr]

    def _run(self, witness: subprocess.Popen[bytes], answers: IO[bytes]) -> None:
        is_local = storage.is_local(self._pulse.run_uri)
        assert witness.stdin is not None
        try:
            with answers, witness.stdin as questions:
                while not self._done.wait(_STORE_SECONDS if is_local else _REMOTE_STORE_SECONDS):
                    self._store(_ask(b"?", questions, answers))
                text = _ask(b"!", questions, answers)
                self._is_told.set()
                self._store(text)
        except (OSError, EOFError):
            # The witness was killed, so nobody reads the pipes, and a print would block once they are full.
            self._restore()
            self._is_told.set()
            self._pass_on()
        finally:
            self._is_told.set()
            for source in self._sources:
                os.close(source)

    def _pass_on(self) -> None:
        """Copies the pipes' content to the original descriptors, until all write ends are closed."""
        with selectors.DefaultSelector() as selector:
            for source in self._sources:
                selector.register(source, selectors.EVENT_READ)
            while selector.get_map():
                for key, _ in selector.select():
                    data = os.read(key.fd, READ_BYTES)
                    if not data:
                        selector.unregister(key.fd)
                    # The original output may be closed.
                    with suppress(OSError):
                        write_all(self._sources[key.fd], data)

    def _store(self, text: bytes) -> None:
        # A store that fails now may take the next one.
        with suppress(Exception):
            if text:
                rank_log.store(self._pulse.run_uri, self._rank, self._line, text)


def with_last_lines(failure: Failure, pulse: Pulse) -> Failure:
    """Returns the failure with the last lines that its rank printed in this launch.

    Runs on the driver, and for a lost rank waits until the witness has stored them.
    """
    # Whatever the store's client raises, the failure itself matters more.
    with suppress(Exception):
        _await_witness(failure, pulse, _PATIENCE_SECONDS)
        start = rank_log.name_start(pulse.token, pulse.launch)
        return replace(failure, last_lines=rank_log.last_lines(pulse.run_uri, failure.rank, start))
    return failure


def await_output(failure: Failure, pulse: Pulse) -> None:
    """Waits until the witness of a lost rank has stored what it printed. Runs on the driver before a restart.

    A short training may otherwise end, and remove the folder of the signs of life, before the witness looks.
    """
    with suppress(Exception):
        _await_witness(failure, pulse, _RESTART_PATIENCE_SECONDS)


def _await_witness(failure: Failure, pulse: Pulse, patience: float) -> None:
    if failure.type != LOST:
        return
    start = rank_log.name_start(pulse.token, pulse.launch)
    deadline = time.monotonic() + patience
    while time.monotonic() < deadline and not _has_died(pulse, failure.rank, start):
        time.sleep(0.1)


def _has_died(pulse: Pulse, rank: int, start: str) -> bool:
    try:
        return storage.read_bytes(rank_log.died_uri(pulse.run_uri, rank)) == start.encode()
    except FileNotFoundError:
        return False


def _ask(question: bytes, questions: IO[bytes], answers: IO[bytes]) -> bytes:
    questions.write(question)
    questions.flush()
    length = answers.read(LENGTH_BYTES)
    if len(length) < LENGTH_BYTES:
        raise EOFError("the witness has ended")
    return answers.read(int.from_bytes(length, "big"))


def _flush() -> None:
    """Writes out what Python's and C's buffers of the standard streams hold, to where it belongs."""
    for stream in (sys.stdout, sys.stderr):
        # The user may have put another object there, or none.
        with suppress(AttributeError, ValueError, OSError):
            stream.flush()
    with suppress(AttributeError, ValueError, OSError):
        library = ctypes.CDLL(None)
        library.fflush(ctypes.c_void_p.in_dll(library, "stdout"))
