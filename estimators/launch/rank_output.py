"""Keeps the output of a rank in the run's folder and for the driver's error, however the rank ends.

Descriptors 1 and 2 become pipes to the log process. Native libraries such as CUDA know only descriptors, not
`sys.stdout`. A thread of the rank stores the output; if the rank dies, the log process stores it.
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
from ringspark.estimators.launch.log_process import LENGTH_BYTES, READ_BYTES, write_all
from ringspark.estimators.training import rank_log
from ringspark.pipelines import storage

_LOG_PROCESS = "ringspark.estimators.launch.log_process"
_STORE_SECONDS = 1.0
# Longer, because a remote store takes the whole file each time.
_REMOTE_STORE_SECONDS = 5.0
# Wait for the log process to forward the rest; short, because perhaps nobody reads the executor's log.
_CLOSE_SECONDS = 1.0
# A store that does not answer must not delay the result.
_LAST_STORE_SECONDS = 5.0
# The log process imports the store's client before it can write; a lost host has no log process.
_PATIENCE_SECONDS = 10.0
# Restarted ranks write into the same file, so they wait for it, but not long for a lost host.
_RESTART_PATIENCE_SECONDS = 3.0


class RankOutput:
    """A context manager that keeps this process's standard output and error. Runs on every rank.

    It does nothing if the system has no pidfd or cannot start a process.
    """

    def __init__(self, pulse: Pulse, rank: int, host: str) -> None:
        self._pulse, self._rank = pulse, rank
        self._start = rank_log.name_start(pulse.token, pulse.launch)
        self._line = rank_log.format_start(rank, host, os.getpid(), self._start)
        self._log_process: subprocess.Popen[bytes] | None = None
        # Descriptor -> copy of its original; empty once the originals are restored.
        self._before: dict[int, int] = {}
        # Read end of each pipe -> descriptor that the pipe replaces. While this process holds the read ends,
        # a print does not fail even if the log process is killed.
        self._sources: dict[int, int] = {}
        self._restoring = threading.Lock()
        self._done, self._has_answered = threading.Event(), threading.Event()

    def __enter__(self) -> RankOutput:
        # If the system refuses a pipe, a process or a thread, the output goes where it went before.
        with suppress(OSError, AttributeError, RuntimeError), ExitStack() as opened:
            os.close(os.pidfd_open(os.getpid()))
            ends: list[int] = []
            for _ in ("output", "error", "answers"):
                ends += os.pipe()
                for end in ends[-2:]:
                    opened.callback(os.close, end)
            out, out_target, err, err_target, answers, answers_target = ends
            kept = [os.dup(descriptor) for descriptor in (1, 2, out, err)]
            log_process = self._start_log_process(out, err, answers_target)
            # If the thread finds the log process dead, it restores only after everything is set up.
            opened.enter_context(self._restoring)
            self._thread = threading.Thread(
                target=self._run,
                args=(log_process, os.fdopen(os.dup(answers), "rb")),
                name="ringspark-rank-log",
                daemon=True,
            )
            self._thread.start()
            _flush()
            # From here on nothing fails.
            self._before, self._sources = {1: kept[0], 2: kept[1]}, {kept[2]: 1, kept[3]: 2}
            os.dup2(out_target, 1)
            os.dup2(err_target, 2)
            self._log_process = log_process
            # Python flushes a pipe only when its buffer is full, which may be never.
            self._set_line_buffering(True)
        return self

    def __exit__(self, *_: Any) -> None:
        if self._log_process is None:
            return
        _flush()
        self._set_line_buffering(False)
        self._restore()
        self._done.set()
        if self._has_answered.wait(_CLOSE_SECONDS):
            self._thread.join(_LAST_STORE_SECONDS)
        # A child of the rank may still write to the pipes: then the log process lives as long as the child.
        with suppress(subprocess.TimeoutExpired):
            self._log_process.wait(_CLOSE_SECONDS)

    def _restore(self) -> None:
        with self._restoring:
            for descriptor, before in self._before.items():
                os.dup2(before, descriptor)
                os.close(before)
            self._before = {}

    def _start_log_process(self, *descriptors: int) -> subprocess.Popen[bytes]:
        # Only this process's path has the modules that Spark shipped.
        path = os.pathsep.join(entry for entry in sys.path if entry)
        arguments = [os.getpid(), *descriptors, self._pulse.run_uri, self._rank, self._start, self._line]
        return subprocess.Popen(
            [sys.executable, "-m", _LOG_PROCESS, *map(str, arguments)],
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

    def _run(self, log_process: subprocess.Popen[bytes], answers: IO[bytes]) -> None:
        is_local = storage.is_local(self._pulse.run_uri)
        assert log_process.stdin is not None
        try:
            with answers, log_process.stdin as questions:
                while not self._done.wait(_STORE_SECONDS if is_local else _REMOTE_STORE_SECONDS):
                    self._store(_ask(b"?", questions, answers))
                text = _ask(b"!", questions, answers)
                self._has_answered.set()
                self._store(text)
        except (OSError, EOFError):
            # The log process was killed. Nobody reads the pipes, and a print would block once they are full.
            self._restore()
            self._has_answered.set()
            self._forward()
        finally:
            self._has_answered.set()
            for source in self._sources:
                os.close(source)

    def _forward(self) -> None:
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
        # A store that fails now may take the next text.
        with suppress(Exception):
            if text:
                rank_log.store(self._pulse.run_uri, self._rank, self._line, text)


def with_last_lines(failure: Failure, pulse: Pulse) -> Failure:
    """Returns the failure with the last lines that its rank printed in this launch. Runs on the driver."""
    # The store's client may raise anything; the failure itself matters more.
    with suppress(Exception):
        _wait_for_log_process(failure, pulse, _PATIENCE_SECONDS)
        start = rank_log.name_start(pulse.token, pulse.launch)
        return replace(failure, last_lines=rank_log.last_lines(pulse.run_uri, failure.rank, start))
    return failure


def wait_for_output(failure: Failure, pulse: Pulse) -> None:
    """Waits until the output of a lost rank is stored. Runs on the driver before a restart.

    Otherwise a short training may remove the heartbeat folder before the output is stored.
    """
    with suppress(Exception):
        _wait_for_log_process(failure, pulse, _RESTART_PATIENCE_SECONDS)


def _wait_for_log_process(failure: Failure, pulse: Pulse, patience: float) -> None:
    if failure.type != LOST:
        return
    start = rank_log.name_start(pulse.token, pulse.launch).encode()
    uri = rank_log.died_uri(pulse.run_uri, failure.rank)
    deadline = time.monotonic() + patience
    while time.monotonic() < deadline:
        with suppress(FileNotFoundError):
            if storage.read_bytes(uri) == start:
                return
        time.sleep(0.1)


def _ask(question: bytes, questions: IO[bytes], answers: IO[bytes]) -> bytes:
    questions.write(question)
    questions.flush()
    length = answers.read(LENGTH_BYTES)
    if len(length) < LENGTH_BYTES:
        raise EOFError("the log process has ended")
    return answers.read(int.from_bytes(length, "big"))


def _flush() -> None:
    for stream in (sys.stdout, sys.stderr):
        # The user may have put another object there, or none.
        with suppress(AttributeError, ValueError, OSError):
            stream.flush()
    with suppress(AttributeError, ValueError, OSError):
        library = ctypes.CDLL(None)
        library.fflush(ctypes.c_void_p.in_dll(library, "stdout"))
