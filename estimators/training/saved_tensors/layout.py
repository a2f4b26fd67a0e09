"""Converts saved tensors to flat memory and back, with the same strides.

Kernels choose their algorithm by strides, so only a tensor with the same strides gives the same bits.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch

Density = Literal["dense", "gaps", "overlapping"]
# Arguments of `as_strided`: size, stride, offset.
Geometry = tuple[tuple[int, ...], tuple[int, ...], int]


@dataclass(frozen=True, kw_only=True, slots=True)
class Flat:
    """A part of a storage as a vector, and the saved tensor as a view of that vector.

    Attributes:
        key: Distinguishes this part from others of the same storage and dtype.
        geometry: The view.
    """

    values: torch.Tensor
    key: tuple[object, ...]
    geometry: Geometry


def density(tensor: torch.Tensor) -> Density:
    """Returns whether the elements fill their memory, leave gaps, or may share an address (if expanded)."""
    span = 1
    result: Density = "dense"
    for stride, size in sorted((s, n) for s, n in zip(tensor.stride(), tensor.shape, strict=True) if n > 1):
        if stride < span:
            return "overlapping"
        if stride > span:
            result = "gaps"
        span += stride * (size - 1)
    return result


def own_values(tensor: torch.Tensor) -> Flat:
    """Returns the tensor's own elements: in memory order if it is dense, else copied without gaps."""
    key = (tensor.storage_offset(), tensor.shape, tensor.stride())
    if density(tensor) != "dense":
        tensor = tensor.contiguous()
    values = tensor.as_strided((tensor.numel(),), (1,))
    return Flat(values=values, key=key, geometry=(tuple(tensor.shape), tensor.stride(), 0))


def whole_memory(tensor: torch.Tensor) -> Flat:
    """Returns the memory that the tensor spans, or its whole storage if it spans at least half of it.

    So views of one storage, such as query, key and value of one projection, are stored once together.
    """
    start = int(tensor.storage_offset())
    stop = start + 1 + sum((n - 1) * s for n, s in zip(tensor.shape, tensor.stride(), strict=True))
    count = tensor.untyped_storage().nbytes() // tensor.itemsize
    if 2 * (stop - start) >= count:
        start, stop = 0, count
    return Flat(
        values=tensor.as_strided((stop - start,), (1,), start),
        key=(start, stop),
        geometry=(tuple(tensor.shape), tensor.stride(), int(tensor.storage_offset()) - start),
    )
