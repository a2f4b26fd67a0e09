"""Waits for the end of a rank's process, and stores what it said last: see `last_words`.

    python -m ringspark.estimators.launch.witness <descriptor of the rank's file> <uri> <launch>

It runs in a process of its own as long as the rank does, so it imports next to nothing before that.
"""

from __future__ import annotations

import os
import sys

# The first bytes of the file hold how many of those behind them have been passed on.
HEAD_BYTES = 8
# How many of the last bytes are stored.
KEPT_BYTES = 1 << 16


def main() -> None:
    """Returns after the rank's process has ended, or is killed before."""
    file, (uri, launch) = int(sys.argv[1]), sys.argv[2:]
    # Nothing is ever written to this pipe, whose other end only the rank holds.
    sys.stdin.buffer.read()
    size = os.fstat(file).st_size
    passed = int.from_bytes(os.pread(file, HEAD_BYTES, 0), "little")
    sys.stderr.buffer.write(os.pread(file, size, HEAD_BYTES + passed))
    sys.stderr.flush()
    kept = os.pread(file, size, max(HEAD_BYTES, size - KEPT_BYTES))
    # Not before, because this import takes more memory than all the rest.
    from ringspark.pipelines import storage

    # A driver that no longer asks has removed the folder of the signs of life.
    if storage.exists(uri.rpartition("/")[0]):
        storage.write_atomic(uri, launch.encode() + b"\n" + kept)


if __name__ == "__main__":
    main()
