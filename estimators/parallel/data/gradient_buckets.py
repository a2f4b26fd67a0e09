"""Lays gradients end to end in buffers that travel between the ranks, with a note of who had which.

Invariant: all ranks make equal buckets from equal parameters, as they sum the buffers element by element.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import nn

from ringspark.estimators.parallel.base import refuse_sparse

# The same size as in DistributedDataParallel: large enough for the network's speed, small enough for overlap.
BUCKET_BYTES = 25 << 20


class GradientBucket:
    """The gradients of some parameters of one dtype, then one number each: how many ranks had a gradient.

    The sums stay where they are: `.grad` is the same memory in every step.

    Attributes:
        parameters: The parameters, in the order of their gradients.
        buffer: The elements of all gradients and the numbers, 1-D; it keeps its place in memory.
        awaited: Indices of the parameters whose gradients are not complete in this step's backward pass.
    """

    def __init__(self, named: Mapping[str, nn.Parameter]) -> None:
        self._names = list(named)
        self.parameters = list(named.values())
        sizes = [p.numel() for p in self.parameters]
        first = self.parameters[0]
        self.buffer = torch.zeros(sum(sizes) + len(sizes), dtype=first.dtype, device=first.device)
        *pieces, self._counts = torch.split(self.buffer, [*sizes, len(sizes)])
        self._views = [shaped_like(p, piece) for p, piece in zip(self.parameters, pieces, strict=True)]
        self._missing: list[int] = []
        self.await_all()

    def await_all(self) -> None:
        """Begins a backward pass."""
        self.awaited = set(range(len(self.parameters)))

    @torch.no_grad()
    def take(self) -> None:
        """Moves this rank's gradients into the buffer; one that it has not counts as zeros.

        Raises:
            ValueError: A gradient is sparse.
        """
        gradients = [p.grad for p in self.parameters]
        for name, gradient in zip(self._names, gradients, strict=True):
            if gradient is not None:
                refuse_sparse(name, gradient)
        # Sums of 1 and 0 over up to 256 ranks are small whole numbers, exact in 16 bits as well.
        self._counts.fill_(1)
        self._missing = [index for index, gradient in enumerate(gradients) if gradient is None]
        if self._missing:
            # Only these: an optimizer that zeroes in place leaves the others' gradients in the buffer.
            torch._foreach_zero_([self._views[index] for index in self._missing])
            torch._foreach_zero_([self._counts[index] for index in self._missing])
        present = [(v, g) for v, g in zip(self._views, gradients, strict=True) if g is not None]
        if present:
            views, found = zip(*present, strict=True)
            torch._foreach_copy_(views, found)
        # The buffer holds them, so their memory is free for the rest of the backward pass.
        for parameter in self.parameters:
            parameter.grad = None

    @torch.no_grad()
    def square(self) -> torch.Tensor:
        """Returns the squared 2-norm of the gradients in the buffer."""
        gradients = self.buffer[: -len(self.parameters)]
        norm: torch.Tensor = torch.linalg.vector_norm(gradients, dtype=norm_dtype(gradients))
        return norm.square()

    def give(self) -> None:
        """Makes the sums in the buffer the parameters' gradients; None where no rank had one.

        Waits for the device only if this rank lacked a gradient: where it had one, the count is not 0.
        """
        for parameter, view in zip(self.parameters, self._views, strict=True):
            parameter.grad = view
        if self._missing:
            counts = self._counts.tolist()
            for index in self._missing:
                if not counts[index]:
                    self.parameters[index].grad = None


def norm_dtype(tensor: torch.Tensor) -> torch.dtype:
    """Returns the dtype in which to sum squares: fp64 where the device has it, for long sums lose digits."""
    return torch.float32 if tensor.device.type == "mps" else torch.float64


def shaped_like(parameter: torch.Tensor, piece: torch.Tensor) -> torch.Tensor:
    """Returns the 1-D `piece` with the shape of `parameter`, and with its strides if it has no gaps."""
    strides = torch.empty_like(parameter, device="meta").stride()
    return piece.as_strided(parameter.shape, strides)


def shape_in_memory(parameter: torch.Tensor) -> torch.Size:
    """Returns the shape with the dimensions in the order in which `shaped_like` lays the elements out."""
    strides = torch.empty_like(parameter, device="meta").stride()
    order = sorted(range(parameter.dim()), key=lambda dim: -strides[dim])
    return torch.Size(parameter.shape[dim] for dim in order)


def deal(named: Mapping[str, nn.Parameter], num_bytes: int | None) -> list[dict[str, nn.Parameter]]:
    """Deals parameters out to buckets, in reverse order: about that in which a backward pass ends.

    Args:
        named: Parameters by name, in the order of the layers.
        num_bytes: Size at which a bucket is full; None for one bucket per dtype.
    """
    full: list[dict[str, nn.Parameter]] = []
    open_by_kind: dict[tuple[torch.dtype, torch.device], dict[str, nn.Parameter]] = {}
    for name, parameter in reversed(list(named.items())):
        kind = (parameter.dtype, parameter.device)
        bucket = open_by_kind.setdefault(kind, {})
        bucket[name] = parameter
        if num_bytes is not None and sum(p.numel() * p.element_size() for p in bucket.values()) >= num_bytes:
            full.append(open_by_kind.pop(kind))
    return [*full, *open_by_kind.values()]
