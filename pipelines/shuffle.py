"""Permutations that are a pure function of (seed, epoch, ...) on every machine.

Only the raw bits of Philox are used (Salmon et al., "Parallel random numbers:
as easy as 1, 2, 3", SC 2011). NumPy promises those bit for bit for ever, but
not the streams of `Generator.permutation`, and a resumed training may well run
on another version of NumPy than the one that wrote the checkpoint.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

MAX_LENGTH = 1 << 40
"""In a longer permutation, fewer than 24 of the 64 bits of a sort key would be random."""

# Up to this length the upper halves of all sort keys are usually distinct.
_RADIX_LENGTH = 1 << 16

_MASK64 = (1 << 64) - 1


def permutation(length: int, *key: int) -> npt.NDArray[np.int64]:
    """Returns a permutation of `range(length)` that depends only on `length` and `key`.

    Every index gets a random 64-bit sort key whose low bits are the index
    itself: all keys differ, so any sorting algorithm gives the same order.

    >>> permutation(8, 7, 0).tolist()  # seed 7, epoch 0: on every machine, by every version of NumPy
    [2, 3, 7, 5, 4, 1, 0, 6]
    >>> permutation(8, 7, 1).tolist()
    [1, 0, 3, 4, 5, 2, 6, 7]

    Args:
        length: How many indexes to permute, fewer than `MAX_LENGTH`.
        key: Whole numbers, e.g. seed, epoch and row group; negative ones are fine.
    """
    assert 0 <= length < MAX_LENGTH, length
    if length == 0:
        return np.zeros(0, dtype=np.int64)
    # The length of the key goes first: SeedSequence pads with zeros, so (1,) and (1, 0) would agree.
    entropy = [len(key), *(part & _MASK64 for part in key)]
    bits = np.random.Philox(np.random.SeedSequence(entropy)).random_raw(length)
    if length <= _RADIX_LENGTH and (by_radix := _order_by_high_bits(bits)) is not None:
        return by_radix
    index_mask = np.uint64((1 << (length - 1).bit_length()) - 1)
    # Done in place: at 100 million row groups each copy is 0.8 GB.
    bits &= ~index_mask
    bits |= np.arange(length, dtype=np.uint64)
    bits.sort()
    bits &= index_mask
    order: npt.NDArray[np.int64] = bits.view(np.int64)
    return order


def _order_by_high_bits(bits: npt.NDArray[np.uint64]) -> npt.NDArray[np.int64] | None:
    """Returns the order of 64-bit keys by their upper 32 bits; None if two of these are equal.

    NumPy sorts 16-bit numbers by radix, so two passes over the halves take half the time of a sort.
    """
    high = (bits >> np.uint64(32)).astype(np.uint32)
    order = np.argsort((high & np.uint32(0xFFFF)).astype(np.uint16), kind="stable")
    order = order[np.argsort((high >> np.uint32(16)).astype(np.uint16)[order], kind="stable")]
    ordered = high[order]
    return None if (ordered[1:] == ordered[:-1]).any() else order
