"""The file of a run directory with the output of one rank: `logs/rank-<k>.txt`.

Each start of the rank adds a header line and its standard output and standard error.
"""

from __future__ import annotations

import re
import time
from contextlib import suppress

from ringspark.estimators import run_layout
from ringspark.pipelines import storage

# Bytes kept of earlier starts.
EARLIER_BYTES = 1 << 16
# Lines of a failed rank in the driver's error, and the characters per line.
_LAST_LINES = 10
_LINE_CHARACTERS = 1000

_FILE = re.compile(r"rank-(\d+)\.txt")
_START = re.compile(r"=== rank \d+ on (\S+), process \d+, started [\d: -]+ UTC \((\S+)\) ===")


def name_start(token: str, launch: int) -> str:
    """Returns a name that identifies one start of a run's ranks."""
    return f"{token[:8]}.{launch}"


def format_start(rank: int, host: str, pid: int, start: str) -> str:
    now = time.strftime("%Y-%m-%d %H:%M:%S", time.gmtime())
    return f"=== rank {rank} on {host or 'unknown'}, process {pid}, started {now} UTC ({start}) ==="


def died_uri(run_uri: str, rank: int) -> str:
    """Returns the file in which the log process of a dead rank says that it has stored everything."""
    return storage.join(run_uri, run_layout.HEARTBEAT, f"rank-{rank}.died")


def store(run_uri: str, rank: int, line: str, text: bytes) -> None:
    """Stores `text` under the header `line` of one start of the rank, after the output of earlier starts."""
    uri = _uri(run_uri, rank)
    earlier = b""
    with suppress(FileNotFoundError):
        earlier = storage.read_bytes(uri).partition(line.encode() + b"\n")[0]
    if len(earlier) > EARLIER_BYTES:
        earlier = earlier[-EARLIER_BYTES:].partition(b"\n")[2]
    if earlier and not earlier.endswith(b"\n"):
        earlier += b"\n"
    # The next write replaces it, so a flush to disk would only disturb the training.
    storage.write_atomic(uri, earlier + line.encode() + b"\n" + text, durable=False)


def read_lines(run_uri: str, rank: int | None = None) -> list[str]:
    """Returns the output of all ranks, or of `rank`, rank after rank, each line as "[rank 1 host-a] ..."."""
    found = [_FILE.fullmatch(name) for name in storage.list_names(storage.join(run_uri, run_layout.LOGS))]
    ranks = sorted(int(match[1]) for match in found if match is not None)
    lines: list[str] = []
    for number in ranks if rank is None else [number for number in ranks if number == rank]:
        host = "unknown"
        for line in _lines(run_uri, number):
            if start := _START.fullmatch(line):
                host = start[1]
            else:
                lines.append(f"[rank {number} {host}] {line}")
    return lines


def last_lines(run_uri: str, rank: int, start: str) -> tuple[str, ...]:
    """Returns the last lines that a rank printed in one start, or none."""
    lines: list[str] | None = None
    for line in _lines(run_uri, rank):
        if found := _START.fullmatch(line):
            lines = [] if found[2] == start else None
        elif lines is not None and line.strip():
            lines.append(line[:_LINE_CHARACTERS])
    return tuple(lines[-_LAST_LINES:]) if lines else ()


def _lines(run_uri: str, rank: int) -> list[str]:
    try:
        text = storage.read_bytes(_uri(run_uri, rank)).decode(errors="replace")
    except FileNotFoundError:
        return []
    # A line may be drawn repeatedly, such as a progress bar; a terminal shows the last state.
    return [line.rstrip("\r").rpartition("\r")[2] for line in text.removesuffix("\n").split("\n")]


def _uri(run_uri: str, rank: int) -> str:
    return storage.join(run_uri, run_layout.LOGS, f"rank-{rank}.txt")
