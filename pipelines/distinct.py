"""How many distinct values a column has, from a sketch of a few kilobytes.

The k smallest hashes of all values (Bar-Yossef et al., "Counting distinct
elements in a data stream", RANDOM 2002): exact up to k values, beyond it with
a standard error of about 1 / sqrt(k), 6 % here. Sketches merge by union, so
tasks need not see each other's data.
"""

from __future__ import annotations

import base64
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

SIZE = 256

_Hashes = npt.NDArray[np.uint64]


@dataclass(frozen=True)
class DistinctSketch:
    """The `SIZE` smallest hashes of the values seen.

    Attributes:
        hashes: Sorted and distinct.
    """

    hashes: _Hashes = field(default_factory=lambda: np.zeros(0, dtype=np.uint64))

    def add(self, values: npt.NDArray[np.generic]) -> DistinctSketch:
        """Returns the sketch with the values of an array of numbers or booleans."""
        if not len(values):
            return self
        hashes = _hash(values)
        if len(self.hashes) == SIZE:
            hashes = hashes[hashes < self.hashes[-1]]
            if not len(hashes):
                return self
        elif len(hashes) > 8 * SIZE:
            # All below the (8 * SIZE)-th smallest: repeats among them are few unless values are few.
            low = hashes[hashes <= np.partition(hashes, 8 * SIZE)[8 * SIZE]]
            if len(np.unique(low)) >= SIZE:
                hashes = low
        return DistinctSketch(np.union1d(self.hashes, hashes)[:SIZE])

    def merge(self, other: DistinctSketch) -> DistinctSketch:
        """Returns the sketch of both together."""
        return DistinctSketch(np.union1d(self.hashes, other.hashes)[:SIZE])

    @property
    def count(self) -> int:
        """Distinct values: exact below `SIZE`, an estimate from there on."""
        if len(self.hashes) < SIZE:
            return len(self.hashes)
        return round((SIZE - 1) / (float(self.hashes[-1]) / 2.0**64))

    def to_text(self) -> str:
        """Returns the sketch as text for JSON."""
        return base64.b64encode(self.hashes.astype("<u8").tobytes()).decode()

    @staticmethod
    def from_text(text: str) -> DistinctSketch:
        """Reads what `to_text` returned."""
        return DistinctSketch(np.frombuffer(base64.b64decode(text), "<u8").astype(np.uint64))


def _hash(values: npt.NDArray[np.generic]) -> _Hashes:
    """Hashes each value to 64 bits: folded, then multiplied (Knuth, "Sorting and Searching", 6.4).

    Distinct values have distinct hashes, and only the largest bits need be evenly spread.
    """
    if values.dtype.kind == "f":
        # Adding zero turns -0.0 into 0.0, and makes the copy that is changed below.
        bits: _Hashes = np.add(values, 0.0, dtype=np.float64).view(np.uint64)
    else:
        bits = values.astype(np.int64).view(np.uint64)
    bits ^= bits >> np.uint64(32)
    bits *= np.uint64(0x9E3779B97F4A7C15)
    bits ^= bits >> np.uint64(29)
    bits *= np.uint64(0xBF58476D1CE4E5B9)
    return bits
