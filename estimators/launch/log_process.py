"""The log process of a rank: forwards the rank's output and keeps its first and last part, see `rank_output`.

    python -m ringspark.estimators.launch.log_process <process id> <descriptors> <run> <rank> <start> <line>

The descriptors are the pipes of standard output, standard error and the answers to the rank. <start> names
this launch, and <line> is the header line of the launch in the log. A "?" on standard input requests the kept
output if there is new output; a "!" also reports the end of the rank's work. If the rank dies before it sends
a "!", this process stores the output.
"""

from __future__ import annotations

import os
import select
import signal
import sys
from contextlib import suppress

# Bytes kept of the beginning and of the end of the output.
HEAD_BYTES = 1 << 16
TAIL_BYTES = 1 << 17
# Each answer starts with its length, in this many bytes.
LENGTH_BYTES = 4

READ_BYTES = 1 << 16
_STORE_SECONDS = 60


class KeptEnds:
    """Keeps the first and the last bytes that were added, in whole lines."""

    def __init__(self, head_bytes: int, tail_bytes: int) -> None:
        self._head_bytes, self._tail_bytes = head_bytes, tail_bytes
        self._head, self._tail = b"", bytearray()
        self._added = 0

    def add(self, data: bytes) -> None:
        self._added += len(data)
        room = self._head_bytes - len(self._head)
        self._head += data[:room]
        self._tail += data[room:]
        # Rarely, because it moves the rest.
        if len(self._tail) > 2 * self._tail_bytes:
            del self._tail[: -self._tail_bytes]

    def text(self) -> bytes:
        """Returns the kept bytes, with a line for the bytes left out in the middle."""
        tail = bytes(self._tail[-self._tail_bytes :])
        if len(self._head) + len(tail) == self._added:
            return self._head + tail
        # A last line longer than the kept tail stays incomplete.
        tail = tail.partition(b"\n")[2] or tail
        left_out = self._added - len(self._head) - len(tail)
        gap = b"" if self._head.endswith(b"\n") else b"\n"
        return self._head + gap + b"[... %d bytes left out ...]\n" % left_out + tail


def main() -> None:
    rank, out, err, answers = map(int, sys.argv[1:5])
    try:
        end = os.pidfd_open(rank)
    except ProcessLookupError:
        end = os.open(os.devnull, os.O_RDONLY)  # always ready, like the descriptor of a dead process
    # Pipe -> original output, which this process has inherited.
    targets = {out: 1, err: 2}
    watched, kept, is_new = [out, err, end, 0], KeptEnds(HEAD_BYTES, TAIL_BYTES), False
    while True:
        ready = select.select(watched, [], [])[0]
        # The rank's output comes first. A child of the rank may keep the pipes open.
        if sources := [source for source in ready if source in targets]:
            for source in sources:
                data = os.read(source, READ_BYTES)
                # The original output may be closed.
                with suppress(OSError):
                    os.write(targets[source], data)
                kept.add(data)
                is_new = is_new or bool(data)
                if not data:
                    watched.remove(source)
                    del targets[source]
            if not targets and end not in watched:
                return
        elif end in ready:
            break
        elif command := os.read(0, 1):
            text = kept.text() if is_new else b""
            with suppress(OSError):
                _answer(answers, len(text).to_bytes(LENGTH_BYTES, "big") + text, end)
            is_new = False
            if command == b"!":
                watched = [source for source in watched if source in targets]
                if not watched:
                    return
        else:
            watched.remove(0)  # the rank has died, or is about to
    signal.alarm(_STORE_SECONDS)
    _store(kept.text())


def _answer(descriptor: int, data: bytes, end: int) -> None:
    """Writes all data; stops if the rank ends, because a child of the rank may hold the pipe and not read."""
    os.set_blocking(descriptor, False)
    while data:
        ended, writable, _ = select.select([end], [descriptor], [])
        if ended:
            return
        if writable:
            data = data[os.write(descriptor, data) :]


def write_all(descriptor: int, data: bytes) -> None:
    while data:
        data = data[os.write(descriptor, data) :]


def _store(text: bytes) -> None:
    run_uri, rank, start, line = sys.argv[5:]
    # Not earlier, because these imports take more memory than all the rest.
    from ringspark.estimators import run_layout
    from ringspark.estimators.training import rank_log
    from ringspark.pipelines import storage

    # A driver that has stopped waiting has removed the heartbeat folder.
    with suppress(storage.UnclaimedError), storage.only_where(run_uri, run_layout.HEARTBEAT):
        if text:
            with suppress(Exception):  # on failure the driver must still get its file
                rank_log.store(run_uri, int(rank), line, text)
        storage.write_atomic(rank_log.died_uri(run_uri, int(rank)), start.encode())


if __name__ == "__main__":
    main()
