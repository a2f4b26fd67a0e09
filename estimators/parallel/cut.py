"""How a rank's parameter is a part of the whole network's: pure arithmetic on shapes and tensors."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import nn


def length_of_part(length: int, rank: int, size: int) -> int:
    """Returns the length of a rank's shard; uneven shards are longer on the first ranks."""
    return length // size + (rank < length % size)


@dataclass(frozen=True)
class Cut:
    """A parameter of which each rank along an axis has a part.

    Attributes:
        axis: Axis of the mesh.
        dim: Dimension that is cut.
        blocks: The dimension is so many equal blocks end to end, each of which is cut by itself, as queries,
            keys and values that one layer computes.
        grid: Ranks along the first and the second dimension of a matrix that is cut along both; the places
            of the axis lie in the grid row by row. `dim` and `blocks` then say nothing.
    """

    axis: str
    dim: int
    blocks: int = 1
    grid: tuple[int, int] | None = None


@dataclass(frozen=True)
class Spread:
    """A tensor of which several parts of a checkpoint have a piece each.

    Attributes:
        shape: Shape of the whole.
        parts: Numbers of the parts that have the pieces, in the order of the cut's places.
    """

    cut: Cut
    shape: tuple[int, ...]
    parts: tuple[int, ...]

    def check(self, name: str, shapes: Sequence[Sequence[int]]) -> None:
        """Refuses what does not describe pieces of these shapes, one for each of `parts`.

        Raises:
            ValueError: The pieces overlap, leave a hole, or are none of such a cut.
        """
        grid = self.cut.grid
        is_cut = (
            self.cut.blocks >= 1 if grid is None else min(grid) >= 1 and math.prod(grid) == len(self.parts)
        )
        try:
            found = [
                shape_of(self.shape, self.cut, place, len(self.parts)) for place in range(len(self.parts))
            ]
            is_whole = is_cut and sum(map(math.prod, found)) == math.prod(self.shape)
        except (IndexError, ValueError, ArithmeticError):
            is_whole = False
        if not is_whole or len(set(self.parts)) != len(self.parts) or found != [list(s) for s in shapes]:
            raise ValueError(
                f"its parts of {name!r} have the shapes {[list(s) for s in shapes]}, which do not make up "
                f"{list(self.shape)}"
            )


def part_of(whole: torch.Tensor, cut: Cut, place: int, size: int) -> torch.Tensor:
    """Returns a copy of the part at a place of the axis; without an axis of several places, of all."""
    if cut.grid is not None and size > 1:
        (rows, columns), (row, column) = cut.grid, divmod(place, cut.grid[1])
        return _narrowed(_narrowed(whole, 0, row, rows), 1, column, columns).clone(
            memory_format=torch.contiguous_format
        )
    blocks = whole.chunk(cut.blocks, cut.dim)
    return torch.cat([_narrowed(block, cut.dim, place, size) for block in blocks], cut.dim).contiguous()


def parameter_part(whole: torch.Tensor, cut: Cut, place: int, size: int) -> nn.Parameter:
    """Returns a parameter's shard, with the attributes that the user set on the parameter."""
    part = nn.Parameter(part_of(whole.detach(), cut, place, size), requires_grad=whole.requires_grad)
    vars(part).update(vars(whole))
    return part


def shape_of(whole: Sequence[int], cut: Cut, place: int, size: int) -> list[int]:
    """Returns the shape of the part at a place."""
    shape = list(whole)
    if cut.grid is not None and size > 1:
        at = divmod(place, cut.grid[1])
        shape[:2] = [length_of_part(shape[dim], at[dim], cut.grid[dim]) for dim in (0, 1)]
        return shape
    shape[cut.dim] = cut.blocks * length_of_part(shape[cut.dim] // cut.blocks, place, size)
    return shape


def join(parts: Sequence[torch.Tensor], cut: Cut) -> torch.Tensor:
    """Reverses `part_of`: puts the parts of all places together, in their order."""
    if cut.grid is not None and len(parts) > 1:
        columns = cut.grid[1]
        return torch.cat([torch.cat(list(parts[i : i + columns]), 1) for i in range(0, len(parts), columns)])
    by_block = zip(*(part.chunk(cut.blocks, cut.dim) for part in parts), strict=True)
    return torch.cat([piece for block in by_block for piece in block], cut.dim)


def _narrowed(block: torch.Tensor, dim: int, place: int, size: int) -> torch.Tensor:
    begin = sum(length_of_part(block.shape[dim], before, size) for before in range(place))
    return block.narrow(dim, begin, length_of_part(block.shape[dim], place, size))
