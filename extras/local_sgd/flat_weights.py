"""Copies the trained parameters of a network, or of a fragment of it, to one vector and back.

The vector is fp32, or fp64 if any parameter is fp64. A complex number is two elements.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch


class FlatWeights:
    def __init__(self, parameters: Sequence[torch.Tensor]) -> None:
        self._parameters = list(parameters)
        self.sizes = [p.numel() * (2 if p.is_complex() else 1) for p in parameters]
        self._is_double = any(p.dtype in (torch.float64, torch.complex128) for p in parameters)

    @torch.no_grad()
    def read(self) -> torch.Tensor:
        dtype = torch.float64 if self._is_double else torch.float32
        return torch.cat([_real(p.detach()).reshape(-1).to(dtype) for p in self._parameters])

    @torch.no_grad()
    def write(self, values: torch.Tensor) -> None:
        if len(values) != sum(self.sizes):
            raise ValueError(
                f"the checkpoint has {len(values)} trained weights per rank, but the network has "
                f"{sum(self.sizes)}; set model to the network of the checkpoint"
            )
        for parameter, piece in zip(self._parameters, torch.split(values, self.sizes), strict=True):
            real = _real(parameter.detach())
            real.copy_(piece.view(real.shape))


def _real(tensor: torch.Tensor) -> torch.Tensor:
    return torch.view_as_real(tensor) if tensor.is_complex() else tensor


def split_into_fragments(parameters: Sequence[torch.Tensor], count: int) -> list[FlatWeights]:
    """Splits parameters into `count` fragments of about equal size, in the order of the layers."""
    if len(parameters) < count:
        raise ValueError(
            f"DiLoCo has {count} fragments for only {len(parameters)} trained parameters; lower fragments"
        )
    total = sum(p.numel() for p in parameters)
    fragments: list[list[torch.Tensor]] = [[]]
    seen = 0
    for index, parameter in enumerate(parameters):
        missing = count - len(fragments)
        is_full = seen * count >= len(fragments) * total
        # No fragment is empty.
        if fragments[-1] and missing and (is_full or len(parameters) - index == missing):
            fragments.append([])
        fragments[-1].append(parameter)
        seen += parameter.numel()
    return [FlatWeights(own) for own in fragments]
