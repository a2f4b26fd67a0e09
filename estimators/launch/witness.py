"""Passes on what a rank writes to standard error, and stores its end if the rank dies: see `last_words`.

    python -m ringspark.estimators.launch.witness <process id> <descriptor to read> <uri> <first line>

It runs as long as the rank does, so it imports next to nothing before that. A byte on standard input says
that the rank's work has ended in order.
"""

from __future__ import annotations

import os
import select
import signal
import sys
from contextlib import suppress

# How many of the last bytes are stored.
_KEPT_BYTES = 1 << 16
# For the store that the last lines go to.
_STORE_SECONDS = 60


def main() -> None:
    """Returns when nobody can write any more, or the rank's process has ended."""
    rank, source, (uri, launch) = int(sys.argv[1]), int(sys.argv[2]), sys.argv[3:]
    try:
        end = os.pidfd_open(rank)
    except ProcessLookupError:
        end = os.open(os.devnull, os.O_RDONLY)  # always ready, as the descriptor of a dead process is
    watched, kept = [source, end, 0], b""
    while True:
        ready = select.select(watched, [], [])[0]
        # What the rank has written comes first: the pipe's own end may be held by a child of the rank.
        if source in ready:
            data = os.read(source, _KEPT_BYTES)
            # Nobody may listen any more.
            with suppress(OSError):
                os.write(2, data)
            kept = (kept + data)[-_KEPT_BYTES:]
            if not data:
                watched.remove(source)
                if end not in watched:
                    return
        elif end in ready:
            break
        elif os.read(0, 1):
            watched = [source]
        else:
            watched.remove(0)  # the rank has died, or is about to
    signal.alarm(_STORE_SECONDS)
    # Not before, because this import takes more memory than all the rest.
    from ringspark.pipelines import storage

    # A driver that no longer asks has removed the folder of the signs of life.
    if storage.exists(uri.rpartition("/")[0]):
        storage.write_atomic(uri, launch.encode() + b"\n" + kept)


if __name__ == "__main__":
    main()
