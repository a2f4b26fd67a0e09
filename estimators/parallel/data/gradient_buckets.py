"""Buckets of gradients: one buffer per bucket, with counts of the ranks that had each gradient.

Invariant: all ranks make equal buckets, because they sum the buffers element by element.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import nn

from ringspark.estimators.parallel.base import refuse_sparse

# As in DistributedDataParallel: large enough for the network's speed, small enough for overlap.
BUCKET_BYTES = 25 << 20


class GradientBucket:
    """Gradients of parameters of one dtype, followed by the number of ranks that had each gradient.

    `.grad` is a view of the buffer, so it is the same memory in every step.

    Attributes:
        buffer: Elements of all gradients and the counts, 1-D; it keeps its memory.
        awaited: Indices of parameters whose gradients are not complete in this step's backward pass.
    """

    def __init__(self, named: Mapping[str, nn.Parameter]) -> None:
        self._names = list(named)
        self.parameters = list(named.values())
        sizes = [p.numel() for p in self.parameters]
        first = self.parameters[0]
        self.buffer = torch.zeros(sum(sizes) + len(sizes), dtype=first.dtype, device=first.device)
        *pieces, self._counts = torch.split(self.buffer, [*sizes, len(sizes)])
        self._views = [view_like(p, piece) for p, piece in zip(self.parameters, pieces, strict=True)]
        self._missing: list[int] = []
        self.await_all()

    def await_all(self) -> None:
        self.awaited = set(range(len(self.parameters)))

    @torch.no_grad()
    def take(self) -> None:
        """Moves this rank's gradients into the buffer; a missing gradient becomes zeros."""
        gradients = [p.grad for p in self.parameters]
        for name, gradient in zip(self._names, gradients, strict=True):
            if gradient is not None:
                refuse_sparse(name, gradient)
        # Sums of 1 and 0 over up to 256 ranks are exact in 16 bits too.
        self._counts.fill_(1)
        self._missing = [index for index, gradient in enumerate(gradients) if gradient is None]
        if self._missing:
            # Only these, because an optimizer that zeroes in place keeps the other gradients in the buffer.
            torch._foreach_zero_([self._views[index] for index in self._missing])
            torch._foreach_zero_([self._counts[index] for index in self._missing])
        present = [(v, g) for v, g in zip(self._views, gradients, strict=True) if g is not None]
        if present:
            views, found = zip(*present, strict=True)
            torch._foreach_copy_(views, found)
        # Frees their memory for the rest of the backward pass.
        for parameter in self.parameters:
            parameter.grad = None

    @torch.no_grad()
    def square(self) -> torch.Tensor:
        gradients = self.buffer[: -len(self.parameters)]
        norm: torch.Tensor = torch.linalg.vector_norm(gradients, dtype=norm_dtype(gradients))
        return norm.square()

    def give(self) -> None:
        """Sets the parameters' gradients to the sums in the buffer, or None if no rank had one.

        Waits for the device only if this rank lacked a gradient: only then can the count of ranks be 0.
        """
        for parameter, view in zip(self.parameters, self._views, strict=True):
            parameter.grad = view
        if self._missing:
            counts = self._counts.tolist()
            for index in self._missing:
                if not counts[index]:
                    self.parameters[index].grad = None


def norm_dtype(tensor: torch.Tensor) -> torch.dtype:
    return torch.float32 if tensor.device.type == "mps" else torch.float64


def view_like(parameter: torch.Tensor, piece: torch.Tensor) -> torch.Tensor:
    """Returns a view of the 1-D `piece` with the parameter's shape and dense memory format."""
    strides = torch.empty_like(parameter, device="meta").stride()
    return piece.as_strided(parameter.shape, strides)


def memory_shape(parameter: torch.Tensor) -> torch.Size:
    """Returns the parameter's shape with the dimensions in memory order."""
    strides = torch.empty_like(parameter, device="meta").stride()
    order = sorted(range(parameter.dim()), key=lambda dim: -strides[dim])
    return torch.Size(parameter.shape[dim] for dim in order)


def split_into_buckets(
    named: Mapping[str, nn.Parameter], num_bytes: int | None
) -> list[dict[str, nn.Parameter]]:
    """Splits parameters into buckets of about `num_bytes`, or into one per dtype if it is None.

    Each bucket has one dtype. The order is reversed, as in a backward pass.
    """
    full: list[dict[str, nn.Parameter]] = []
    growing: dict[tuple[torch.dtype, torch.device], dict[str, nn.Parameter]] = {}
    for name, parameter in reversed(list(named.items())):
        key = (parameter.dtype, parameter.device)
        bucket = growing.setdefault(key, {})
        bucket[name] = parameter
        if num_bytes is not None and sum(p.nbytes for p in bucket.values()) >= num_bytes:
            full.append(growing.pop(key))
    return [*full, *growing.values()]
