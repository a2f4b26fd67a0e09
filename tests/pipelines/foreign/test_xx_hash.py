"""Hashing of long strings: little memory beside them, and the hashes of short slices."""

from __future__ import annotations

import tracemalloc

import numpy as np
import pyarrow as pa
import pytest

from ringspark.pipelines.foreign import xx_hash


def test_long_strings_are_hashed_in_little_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    # Some lengths twice, one string longer than what is hashed at a time.
    texts = [f"{number:07d}" * 100 for number in range(1_000)] + ["long" * 20_000, "", "é", "ab"]
    strings = pa.array(texts)
    monkeypatch.setattr(xx_hash, "_HASHED_BYTES", 70_000)
    tracemalloc.start()
    found = xx_hash.buckets(strings, 1 << 40, 7)
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak < 3 * strings.nbytes
    monkeypatch.setattr(xx_hash, "_HASHED_BYTES", 1 << 40)
    assert np.array_equal(xx_hash.buckets(strings, 1 << 40, 7), found)
    assert len(set(found.tolist())) == len(texts)
