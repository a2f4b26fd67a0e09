"""Reads one tensor at a time of a `.safetensors` file, which is never mapped as a whole.

Each tensor is mapped by itself and unmapped with its last reference, so a process needs memory and address
space for the tensors that it uses at a time. `tensor_file.read` maps all of the file, which a limit of the
address space (`spark.executor.pyspark.memory`) counts, and which the kernel refuses for more than memory and
swap together. The mapping is private, as that one is.
"""

from __future__ import annotations

import math
import mmap
import os
import weakref
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch

from ringspark.estimators.training.checkpoint.tensor_file import DTYPES, read_header

# Smaller tensors cost more to map than to keep: biases, norms, statistics.
KEPT_BYTES = 64 << 10


@dataclass(frozen=True)
class Place:
    """Where a tensor lies in the file: `num_bytes` from byte `start` on."""

    dtype: torch.dtype
    shape: tuple[int, ...]
    start: int
    num_bytes: int


class StreamedFile:
    """An open `.safetensors` file; it stays readable after its name is removed.

    Attributes:
        places: Where each tensor lies, by name.
    """

    def __init__(self, path: str) -> None:
        """Opens a local file and reads its header.

        Raises:
            ValueError: The file is not what `tensor_file.write` wrote.
        """
        self._descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        weakref.finalize(self, os.close, self._descriptor)
        try:
            self.places = _places(self._descriptor)
        except (OSError, ValueError, LookupError, TypeError, AttributeError, RecursionError) as error:
            raise ValueError(
                f"{path} is no readable safetensors file ({error}); take another checkpoint"
            ) from error

    def small(self) -> dict[str, torch.Tensor]:
        """Returns all tensors by name, but those that are not small without numbers."""
        return {
            name: self.read(name)
            if place.num_bytes <= KEPT_BYTES
            else torch.empty(place.shape, dtype=place.dtype, device="meta")
            for name, place in self.places.items()
        }

    def announce(self, name: str) -> None:
        """Lets the kernel read a tensor into its page cache, in large pieces, while this process goes on."""
        place = self.places[name]
        os.posix_fadvise(self._descriptor, place.start, place.num_bytes, os.POSIX_FADV_WILLNEED)

    def read(self, name: str) -> torch.Tensor:
        """Returns a tensor; a small one in memory of its own, any other as a view of a mapping of its own.

        Raises:
            MemoryError: This process may not map as much.
        """
        place = self.places[name]
        if not place.num_bytes:
            return torch.empty(place.shape, dtype=place.dtype)
        # At the same distance from a page's start as in a mapping of the file: kernels choose their path by
        # how numbers are aligned, and sums depend on it.
        shift = place.start % mmap.ALLOCATIONGRANULARITY
        length, start = shift + place.num_bytes, place.start - shift
        try:
            if place.num_bytes <= KEPT_BYTES:
                memory = mmap.mmap(-1, length)
                count = os.preadv(self._descriptor, [memoryview(memory)[shift:]], place.start)
                if count != place.num_bytes:
                    raise ValueError(f"the file of weights {name!r} was cut short; load the model again")
            else:
                memory = mmap.mmap(self._descriptor, length, access=mmap.ACCESS_COPY, offset=start)
        except OSError as error:
            raise MemoryError(
                f"the weights {name!r} have {place.num_bytes:,} bytes, which this process may not map "
                f"({error}); the largest tensor must fit in what a worker may have, also with "
                "inferenceOffload='disk', see spark.executor.pyspark.memory"
            ) from error
        numbers = torch.frombuffer(memory, dtype=torch.uint8, count=place.num_bytes, offset=shift)
        return numbers.view(place.dtype).reshape(place.shape)


def _places(descriptor: int) -> dict[str, Place]:
    """Reads the header; checks it as strictly as the library does.

    Raises:
        ValueError: It is no header, or tensors lie on each other, leave gaps, or lie outside the file.
    """
    with open(descriptor, "rb", closefd=False) as file:
        entries, origin = read_header(file)
    places = {name: _place(name, entry, origin) for name, entry in entries.items()}
    end, size = origin, os.fstat(descriptor).st_size
    for place in sorted(places.values(), key=lambda place: (place.start, place.num_bytes)):
        if place.start != end:
            raise ValueError(f"a tensor begins at byte {place.start}, the one before it ends at {end}")
        end += place.num_bytes
    if end != size:
        raise ValueError(f"its tensors end at byte {end} of {size}")
    return places


def _place(name: str, tensor: Mapping[str, Any], origin: int) -> Place:
    dtype, shape = DTYPES[tensor["dtype"]], tuple(tensor["shape"])
    start, stop = tensor["data_offsets"]
    if not all(type(number) is int and number >= 0 for number in (*shape, start, stop)):
        raise ValueError(f"tensor {name!r} has a size or place that is no number of bytes")
    if stop - start != math.prod(shape) * dtype.itemsize:
        raise ValueError(f"tensor {name!r} of shape {list(shape)} has {stop - start} bytes")
    if (origin + start) % dtype.itemsize:
        raise ValueError(f"tensor {name!r} does not begin at a multiple of its numbers' width")
    return Place(dtype, shape, origin + start, stop - start)
