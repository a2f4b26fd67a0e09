"""A matrix that is cut along both of its dimensions, over a grid of the ranks.

van de Geijn and Watts 1997, "SUMMA", with the weights at rest: rank (i, j) has block (i, j) of the matrix. It
multiplies its part j of the inputs; the partial outputs are summed along the row i of the grid, and the parts
of the outputs gathered along its column j. A rank sums 1/rows of the outputs, over columns ranks, where a
layer that is cut by its inputs sums all of them over all ranks; in the backward pass likewise with the
inputs' gradient. So each message is between fewer ranks, and of a part.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F

from ringspark.estimators.collectives import Collective
from ringspark.estimators.collectives.local_collective import LocalCollective
from ringspark.estimators.parallel.cut import Cut, parameter_part
from ringspark.estimators.parallel.mesh import RankMesh, groups_over
from ringspark.estimators.parallel.model.communication import copied, joined, part_of_whole, summed
from ringspark.estimators.parallel.model.stand_in import StandIn

AXIS = "tensor"
# Rows and columns of a grid -> the ranks of this rank's column, and those of its row.
Grids = Callable[[int, int], tuple[Collective, Collective]]


class MeshGrids:
    """Makes each grid of the ranks along 'tensor' once. All ranks of the world ask for the same ones."""

    def __init__(self, mesh: RankMesh) -> None:
        self._mesh = mesh
        self._made: dict[tuple[int, int], tuple[Collective, Collective]] = {}

    def __call__(self, rows: int, columns: int) -> tuple[Collective, Collective]:
        if (rows, columns) not in self._made:
            copies = groups_over(self._mesh.sizes, (AXIS,))
            down = [ranks[column::columns] for ranks in copies for column in range(columns)]
            across = [ranks[i : i + columns] for ranks in copies for i in range(0, len(ranks), columns)]
            self._made[rows, columns] = self._part(down), self._part(across)
        return self._made[rows, columns]

    def _part(self, groups: list[list[int]]) -> Collective:
        if len(groups[0]) == 1:
            return LocalCollective()
        if len(groups) == 1:
            return self._mesh.world
        part: Collective | None = self._mesh.world.part(groups)  # type: ignore[attr-defined]
        assert part is not None  # the groups hold every rank
        return part


def grids_without_peers(collective: Any) -> Grids:
    """Returns grids for one rank whose peers are not there, of whatever stands for its collective."""

    def grid(rows: int, columns: int) -> tuple[Collective, Collective]:
        row, column = divmod(collective.rank, columns)
        made = type(collective)(row, rows), type(collective)(column, columns)
        if isinstance(collective, StandIn):
            for part in made:
                part.messages = collective.messages
        return made

    return grid


class GridLinear(nn.Module):
    """A linear layer of which this rank has a block: (..., in) -> (..., out), both whole."""

    def __init__(self, layer: nn.Linear, collective: Collective, grids: Grids, grid: tuple[int, int]) -> None:
        """Takes this rank's block.

        Raises:
            ValueError: The grid is not of all ranks.
        """
        super().__init__()
        rows, columns = grid
        if rows * columns != collective.size:
            needed, there = rows * columns, collective.size
            raise ValueError(f"style 'grid' {list(grid)} is of {needed} workers, and 'tensor' has {there}")
        self._down, self._across = grids(rows, columns)
        self._outputs = layer.out_features
        cut = Cut(AXIS, 0, grid=grid)
        self.weight = parameter_part(layer.weight, cut, collective.rank, collective.size)
        self.bias = layer.bias
        self.cuts = {"weight": cut}

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        own = copied(part_of_whole(x, -1, self._across), self._down)
        out = summed(F.linear(own, self.weight), self._across)
        out = joined(out, -1, self._down, self._outputs)
        return out if self.bias is None else out + self.bias.to(out.dtype)
