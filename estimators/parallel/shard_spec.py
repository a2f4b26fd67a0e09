"""Computes a rank's shard of a parameter from the whole parameter; needs no communication."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import nn


def shard_length(length: int, rank: int, size: int) -> int:
    """Returns the length of a rank's shard; uneven shards are longer on the first ranks."""
    return length // size + (rank < length % size)


def shard_range(length: int, rank: int, size: int) -> tuple[int, int]:
    """Returns the indices of a rank's first element and of the next rank's first element."""
    begin = rank * (length // size) + min(rank, length % size)
    return begin, begin + shard_length(length, rank, size)


@dataclass(frozen=True)
class ShardSpec:
    """How a parameter is sharded along one axis of the mesh. Checkpoints store its fields.

    Attributes:
        axis: Axis of the mesh.
        dim: Sharded dimension.
        blocks: Number of equal blocks of the dimension, each sharded separately, such as the queries, keys
            and values that one layer computes.
        grid: Ranks along both dimensions of a matrix that is sharded along both; replaces `dim` and `blocks`.
    """

    axis: str
    dim: int
    blocks: int = 1
    grid: tuple[int, int] | None = None


@dataclass(frozen=True)
class CheckpointShards:
    """A tensor with shards in several `parts` of a checkpoint, in the order of ranks along the mesh axis.

    Checkpoints store these fields.
    """

    cut: ShardSpec
    shape: tuple[int, ...]
    parts: tuple[int, ...]

    def check(self, name: str, shapes: Sequence[Sequence[int]]) -> None:
        """Raises ValueError if shards overlap, leave a hole, or do not follow the spec."""
        grid, size = self.cut.grid, len(self.parts)
        is_valid = self.cut.blocks >= 1 if grid is None else min(grid) >= 1 and math.prod(grid) == size
        try:
            expected = [shard_shape(self.shape, self.cut, rank, size) for rank in range(size)]
            is_whole = is_valid and sum(map(math.prod, expected)) == math.prod(self.shape)
        except (IndexError, ValueError, ArithmeticError):
            is_whole = False
        if not is_whole or len(set(self.parts)) != size or expected != [list(s) for s in shapes]:
            raise ValueError(
                f"the shards of {name!r} have the shapes {[list(s) for s in shapes]}, which do not make up "
                f"{list(self.shape)}"
            )


def copy_shard(whole: torch.Tensor, spec: ShardSpec, rank: int, size: int) -> torch.Tensor:
    if spec.grid is not None and size > 1:
        (rows, columns), (row, column) = spec.grid, divmod(rank, spec.grid[1])
        shard = shard_view(shard_view(whole, 0, row, rows), 1, column, columns)
        return shard.clone(memory_format=torch.contiguous_format)
    blocks = whole.chunk(spec.blocks, spec.dim)
    return torch.cat([shard_view(block, spec.dim, rank, size) for block in blocks], spec.dim).contiguous()


def shard_view(x: torch.Tensor, dim: int, rank: int, size: int) -> torch.Tensor:
    begin, end = shard_range(x.shape[dim], rank, size)
    return x.narrow(dim, begin, end - begin)


def shard_parameter(whole: torch.Tensor, spec: ShardSpec, rank: int, size: int) -> nn.Parameter:
    shard = nn.Parameter(copy_shard(whole.detach(), spec, rank, size), requires_grad=whole.requires_grad)
    vars(shard).update(vars(whole))
    return shard


def shard_shape(whole: Sequence[int], spec: ShardSpec, rank: int, size: int) -> list[int]:
    shape = list(whole)
    if spec.grid is not None and size > 1:
        at = divmod(rank, spec.grid[1])
        shape[:2] = [shard_length(shape[dim], at[dim], spec.grid[dim]) for dim in (0, 1)]
        return shape
    shape[spec.dim] = spec.blocks * shard_length(shape[spec.dim] // spec.blocks, rank, size)
    return shape


def join_shards(shards: Sequence[torch.Tensor], spec: ShardSpec) -> torch.Tensor:
    """Returns the whole tensor; `shards` are in the order of ranks along the mesh axis."""
    if spec.grid is not None and len(shards) > 1:
        columns = spec.grid[1]
        return torch.cat(
            [torch.cat(list(shards[i : i + columns]), 1) for i in range(0, len(shards), columns)]
        )
    by_block = zip(*(shard.chunk(spec.blocks, spec.dim) for shard in shards), strict=True)
    return torch.cat([piece for block in by_block for piece in block], spec.dim)
