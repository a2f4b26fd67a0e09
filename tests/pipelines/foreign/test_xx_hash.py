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


def test_hashes_are_those_of_the_reference_code() -> None:
    # The values that the tests of cespare/xxhash take from the code in C, for the seed 0.
    known = {
        "": 0xEF46DB3751D8E999,
        "a": 0xD24EC4F1A98C6E5B,
        "as": 0x1C330FB2D66BE179,
        "asd": 0x631C37CE72A97393,
        "asdf": 0x415872F599CEA71E,
        "Call me Ishmael. Some years ago--never mind how long precisely-": 0x02A2E85470D6FD96,
    }
    found = xx_hash._hash_strings(pa.array([text.encode() for text in known], pa.large_binary()), 0)
    assert found.tolist() == list(known.values())
