"""Reads one tensor at a time from a `.safetensors` file, without mapping the whole file.

The whole file would count against a limit of the address space (`spark.executor.pyspark.memory`).
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

# Tensors up to this size are kept: biases, norms and statistics cost more to map.
KEPT_BYTES = 64 << 10


@dataclass(frozen=True)
class TensorSlice:
    dtype: torch.dtype
    shape: tuple[int, ...]
    start: int
    num_bytes: int


class StreamedFile:
    """An open `.safetensors` file; it stays readable after its name is removed."""

    def __init__(self, path: str) -> None:
        """Opens a local file and reads its header. Raises ValueError if the file is damaged."""
        self._descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        weakref.finalize(self, os.close, self._descriptor)
        try:
            self.slices = _read_slices(self._descriptor)
        except (OSError, ValueError, LookupError, TypeError, AttributeError, RecursionError) as error:
            raise ValueError(
                f"{path} is no readable safetensors file ({error}); use another checkpoint"
            ) from error

    def small(self) -> dict[str, torch.Tensor]:
        """Returns all tensors by name; tensors above `KEPT_BYTES` are on the device "meta"."""
        return {
            name: self.read(name)
            if entry.num_bytes <= KEPT_BYTES
            else torch.empty(entry.shape, dtype=entry.dtype, device="meta")
            for name, entry in self.slices.items()
        }

    def announce(self, name: str) -> None:
        """Lets the kernel read a tensor into its page cache in the background, in large blocks."""
        entry = self.slices[name]
        os.posix_fadvise(self._descriptor, entry.start, entry.num_bytes, os.POSIX_FADV_WILLNEED)

    def read(self, name: str) -> torch.Tensor:
        """Returns a tensor: a copy if it is small, else a view of a new mapping."""
        entry = self.slices[name]
        if not entry.num_bytes:
            return torch.empty(entry.shape, dtype=entry.dtype)
        # At the same distance from a page's start as in a mapping of the file: kernels choose their path by
        # the alignment of numbers, and sums depend on it.
        shift = entry.start % mmap.ALLOCATIONGRANULARITY
        length, start = shift + entry.num_bytes, entry.start - shift
        try:
            if entry.num_bytes <= KEPT_BYTES:
                memory = mmap.mmap(-1, length)
                count = os.preadv(self._descriptor, [memoryview(memory)[shift:]], entry.start)
                if count != entry.num_bytes:
                    raise ValueError(f"the file of weights {name!r} was cut short; load the model again")
            else:
                memory = mmap.mmap(self._descriptor, length, access=mmap.ACCESS_COPY, offset=start)
        except OSError as error:
            raise MemoryError(
                f"the weights {name!r} have {entry.num_bytes:,} bytes, which this process may not map "
                f"({error}); the largest tensor must fit in a worker's memory, also with "
                "inferenceOffload='disk', see spark.executor.pyspark.memory"
            ) from error
        numbers = torch.frombuffer(memory, dtype=torch.uint8, count=entry.num_bytes, offset=shift)
        return numbers.view(entry.dtype).reshape(entry.shape)


def _read_slices(descriptor: int) -> dict[str, TensorSlice]:
    """Reads the header; checks it as strictly as the safetensors library."""
    with open(descriptor, "rb", closefd=False) as file:
        entries, origin = read_header(file)
    slices = {name: _parse_slice(name, entry, origin) for name, entry in entries.items()}
    end, size = origin, os.fstat(descriptor).st_size
    for entry in sorted(slices.values(), key=lambda entry: (entry.start, entry.num_bytes)):
        if entry.start != end:
            raise ValueError(f"a tensor begins at byte {entry.start}, the one before it ends at {end}")
        end += entry.num_bytes
    if end != size:
        raise ValueError(f"its tensors end at byte {end}, but the file has {size} bytes")
    return slices


def _parse_slice(name: str, tensor: Mapping[str, Any], origin: int) -> TensorSlice:
    dtype, shape = DTYPES[tensor["dtype"]], tuple(tensor["shape"])
    start, stop = tensor["data_offsets"]
    if not all(type(number) is int and number >= 0 for number in (*shape, start, stop)):
        raise ValueError(f"tensor {name!r} has a size or offset that is no number of bytes")
    if stop - start != math.prod(shape) * dtype.itemsize:
        raise ValueError(f"tensor {name!r} of shape {list(shape)} has {stop - start} bytes")
    if (origin + start) % dtype.itemsize:
        raise ValueError(f"tensor {name!r} does not begin at a multiple of its numbers' width")
    return TensorSlice(dtype, shape, origin + start, stop - start)
