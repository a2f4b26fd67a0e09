"""A matrix sharded along both dimensions (van de Geijn and Watts 1997, "SUMMA", stationary weights).

Rank (i, j) has block (i, j) and multiplies shard j of the inputs. The outputs are all-reduced along row i of
the grid and all-gathered along column j, so each message is a shard and has few ranks.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache, partial
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F

from ringspark.estimators.collectives import Collective
from ringspark.estimators.parallel.mesh import RankMesh, group_ranks, join_group
from ringspark.estimators.parallel.shard_spec import ShardSpec, copy_shard, shard_parameter
from ringspark.extras.model_parallel.communication import (
    all_gather,
    all_reduce,
    all_reduce_gradient,
    take_shard,
)
from ringspark.extras.model_parallel.fake_collective import FakeCollective
from ringspark.models.lora import Adapter, add_adapter

AXIS = "tensor"
# (rows, columns) -> collectives of this rank's column and row of the grid.
Grids = Callable[[int, int], tuple[Collective, Collective]]


def make_mesh_grids(mesh: RankMesh) -> Grids:
    """Returns a function that makes each grid of the ranks along 'tensor' once. It runs on every rank."""
    groups = group_ranks(mesh.sizes, (AXIS,))

    @cache
    def grid(rows: int, columns: int) -> tuple[Collective, Collective]:
        down = [ranks[column::columns] for ranks in groups for column in range(columns)]
        across = [ranks[i : i + columns] for ranks in groups for i in range(0, len(ranks), columns)]
        return join_group(mesh.world, down), join_group(mesh.world, across)

    return grid


def make_fake_grids(collective: Any) -> Grids:
    def grid(rows: int, columns: int) -> tuple[Collective, Collective]:
        row, column = divmod(collective.rank, columns)
        made: Any = FakeCollective(row, rows), FakeCollective(column, columns)
        for part in made:
            part.messages = collective.messages
        return made  # type: ignore[no-any-return]

    return grid


class GridLinear(nn.Module):
    """A linear layer with this rank's block of the weight: (..., in) -> (..., out), both replicated."""

    def __init__(self, layer: nn.Linear, collective: Collective, grids: Grids, grid: tuple[int, int]) -> None:
        super().__init__()
        rows, columns = grid
        if rows * columns != collective.size:
            needed, given = rows * columns, collective.size
            raise ValueError(f"style 'grid' {list(grid)} needs {needed} workers, but 'tensor' has {given}")
        self._down, self._across = grids(rows, columns)
        self._outputs = layer.out_features
        spec = ShardSpec(AXIS, 0, grid=grid)
        self.own_block = partial(copy_shard, spec=spec, rank=collective.rank, size=collective.size)
        self.weight = shard_parameter(layer.weight, spec, collective.rank, collective.size)
        self.bias = layer.bias
        self.cuts = {"weight": spec}

    def adapt(self, adapter: Adapter) -> None:
        """Adds the whole adapter: every rank has all inputs and outputs."""
        add_adapter(self, adapter)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        own = all_reduce_gradient(take_shard(x, -1, self._across), self._down)
        out = all_reduce(F.linear(own, self.weight), self._across)
        out = all_gather(out, -1, self._down, self._outputs)
        return out if self.bias is None else out + self.bias.to(out.dtype)
