"""How a rank's parameter is a part of the whole network's: pure arithmetic on shapes and tensors."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from ringspark.estimators.parallel.model.communication import length_of_part


@dataclass(frozen=True)
class Cut:
    """A parameter of which each rank along an axis has a part.

    Attributes:
        axis: Axis of the mesh.
        dim: Dimension that is cut.
        blocks: The dimension is so many equal blocks end to end, each of which is cut by itself, as queries,
            keys and values that one layer computes.
    """

    axis: str
    dim: int
    blocks: int = 1


def part_of(whole: torch.Tensor, cut: Cut, place: int, size: int) -> torch.Tensor:
    """Returns a copy of the part at a place of the axis; without an axis of several places, of all."""
    blocks = whole.chunk(cut.blocks, cut.dim)
    return torch.cat([_narrowed(block, cut.dim, place, size) for block in blocks], cut.dim).contiguous()


def length_of(whole: int, cut: Cut, place: int, size: int) -> int:
    """Returns the length of the cut dimension of a part."""
    return cut.blocks * length_of_part(whole // cut.blocks, place, size)


def join(parts: Sequence[torch.Tensor], cut: Cut) -> torch.Tensor:
    """Reverses `part_of`: puts the parts of all places together, in their order."""
    by_block = zip(*(part.chunk(cut.blocks, cut.dim) for part in parts), strict=True)
    return torch.cat([piece for block in by_block for piece in block], cut.dim)


def _narrowed(block: torch.Tensor, dim: int, place: int, size: int) -> torch.Tensor:
    begin = sum(length_of_part(block.shape[dim], before, size) for before in range(place))
    return block.narrow(dim, begin, length_of_part(block.shape[dim], place, size))
