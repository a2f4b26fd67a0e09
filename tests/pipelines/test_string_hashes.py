"""String hashing needs little extra memory and equals Spark's hash."""

import tracemalloc

import numpy as np
import pyarrow as pa

from ringspark.pipelines.kinds.strings import hash_buckets


def test_long_strings_are_hashed_in_little_memory() -> None:
    texts = [f"{number:07d}" * 100 for number in range(1_000)] + ["long" * 20_000, "", "é", "ab"]
    strings = pa.array(texts)
    tracemalloc.start()
    found = hash_buckets(strings, 1 << 40, 7)
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak < strings.nbytes
    assert np.array_equal(hash_buckets(pa.array(["before", *texts])[1:], 1 << 40, 7), found)
    assert len(set(found.tolist())) == len(texts)
    for nothing in (pa.array([], pa.string()), pa.array([""])):
        assert len(hash_buckets(nothing, 9, 7)) == len(nothing)


def test_hashes_are_those_of_spark() -> None:
    # Results of pmod(xxhash64(-3L, text), 1000003L) in Spark 4.3.
    known = {
        "": 780582,
        "a": 198025,
        "é": 628564,
        "Call me Ishmael. Some years ago--never mind how long": 123824,
    }
    assert hash_buckets(pa.array(list(known)), 1_000_003, -3).tolist() == list(known.values())
