"""The clock of a store, by which the ages of its files are measured."""

from __future__ import annotations

import uuid

from ringspark.pipelines import storage


def read_store_clock(root: str) -> float:
    """Returns the seconds since 1970 by the clock of the store, from a file that it writes there."""
    probe = storage.join(root, f".ringspark-probe-{uuid.uuid4().hex}")
    storage.write_atomic(probe, b"")
    try:
        fs, path = storage.filesystem(probe)
        return float(fs.modified(path).timestamp())
    finally:
        storage.remove(probe)
