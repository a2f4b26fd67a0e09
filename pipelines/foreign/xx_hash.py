"""Spark SQL's `xxhash64` of strings, in NumPy: a reader hashes what no write has hashed.

XXH64 (https://github.com/Cyan4973/xxHash/blob/dev/doc/xxhash_spec.md). All strings of
one length are hashed at a time. The package xxhash would give the same numbers by less code, but is compiled:
every worker would need it, also where this package comes as a zip alone, for one kind in tables of others.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa

UInt64Array = npt.NDArray[np.uint64]

_P1, _P2, _P3, _P4, _P5 = (
    np.uint64(prime)
    for prime in (
        0x9E3779B185EBCA87,
        0xC2B2AE3D27D4EB4F,
        0x165667B19E3779F9,
        0x85EBCA77C2B2AE63,
        0x27D4EB2F165667C5,
    )
)
_SPARK_SEED = 42
_MASK = (1 << 64) - 1
_HASHED_BYTES = 1 << 20
"""Bytes of strings that are hashed at a time: each takes the place of eight more meanwhile."""


def buckets(strings: Any, num_buckets: int, seed: int) -> npt.NDArray[np.int64]:
    """Returns `pmod(xxhash64(seed, string), num_buckets)` of an Arrow array of strings without nulls."""
    encoded = strings.dictionary_encode()
    hashes = _hash_strings(encoded.dictionary.cast(pa.large_binary()), _hash_long(seed)).view(np.int64)
    found: npt.NDArray[np.int64] = (hashes % num_buckets)[encoded.indices.to_numpy()]
    return found


def _hash_long(value: int) -> int:
    """Returns the hash of one bigint with Spark's own seed."""
    # As an array: a scalar would warn of the overflow that the arithmetic wants.
    number = np.asarray([value & _MASK], dtype=np.uint64)
    start = np.asarray([(_SPARK_SEED + int(_P5) + 8) & _MASK], dtype=np.uint64)
    return int(_mix(_rotate(start ^ _round(np.zeros_like(number), number), 27) * _P1 + _P4)[0])


def _hash_strings(strings: Any, seed: int) -> UInt64Array:
    """Returns the hash of every value of an Arrow array of large_binary."""
    hashes = np.zeros(len(strings), dtype=np.uint64)
    if not len(strings):
        return hashes
    _, offset_buffer, data_buffer = strings.buffers()
    offsets = np.frombuffer(offset_buffer, np.int64)[strings.offset :][: len(strings) + 1]
    data = np.frombuffer(data_buffer, np.uint8) if data_buffer is not None else np.zeros(0, np.uint8)
    lengths = np.diff(offsets)
    for length in np.unique(lengths).tolist():
        all_rows = np.flatnonzero(lengths == length)
        some = max(1, _HASHED_BYTES // max(1, length))
        for first in range(0, len(all_rows), some):
            rows = all_rows[first : first + some]
            if some == 1:  # no copy of what may be long
                start = offsets[rows[0]]
                hashes[rows] = _hash_equal_lengths(data[None, start : start + length], seed)
            else:
                hashes[rows] = _hash_equal_lengths(data[offsets[rows][:, None] + np.arange(length)], seed)
    return hashes


def _hash_equal_lengths(data: npt.NDArray[np.uint8], seed: int) -> UInt64Array:
    """Returns the hash of every row of (rows, length) bytes."""
    rows, length = data.shape

    def lane(at: int, width: int) -> UInt64Array:
        words: npt.NDArray[Any] = np.ascontiguousarray(data[:, at : at + width]).view(f"<u{width}")[:, 0]
        return words.astype(np.uint64)

    def filled(value: int) -> UInt64Array:
        return np.full(rows, value & _MASK, dtype=np.uint64)

    at = 0
    if length >= 32:
        p1, p2 = int(_P1), int(_P2)
        parts = [filled(seed + p1 + p2), filled(seed + p2), filled(seed), filled(seed - p1)]
        while at + 32 <= length:
            parts = [_round(part, lane(at + 8 * i, 8)) for i, part in enumerate(parts)]
            at += 32
        hashes = sum((_rotate(p, n) for p, n in zip(parts, (1, 7, 12, 18), strict=True)), filled(0))
        for part in parts:
            hashes = (hashes ^ _round(filled(0), part)) * _P1 + _P4
    else:
        hashes = filled(seed + int(_P5))
    hashes = hashes + filled(length)
    while at + 8 <= length:
        hashes = _rotate(hashes ^ _round(filled(0), lane(at, 8)), 27) * _P1 + _P4
        at += 8
    if at + 4 <= length:
        hashes = _rotate(hashes ^ (lane(at, 4) * _P1), 23) * _P2 + _P3
        at += 4
    while at < length:
        hashes = _rotate(hashes ^ (lane(at, 1) * _P5), 11) * _P1
        at += 1
    return _mix(hashes)


def _round(state: UInt64Array, word: UInt64Array) -> UInt64Array:
    return _rotate(state + word * _P2, 31) * _P1


def _rotate(value: UInt64Array, bits: int) -> UInt64Array:
    return (value << np.uint64(bits)) | (value >> np.uint64(64 - bits))


def _mix(value: UInt64Array) -> UInt64Array:
    value = (value ^ (value >> np.uint64(33))) * _P2
    value = (value ^ (value >> np.uint64(29))) * _P3
    return value ^ (value >> np.uint64(32))
