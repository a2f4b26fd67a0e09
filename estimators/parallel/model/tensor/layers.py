"""The layers of which each rank has a part.

In the forward pass of a pair, cut by outputs and then by inputs, nothing is exchanged between the two.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import nn
from torch.nn import functional as F

from ringspark.estimators.collectives import Collective
from ringspark.estimators.parallel.cut import Cut, parameter_part, part_of
from ringspark.estimators.parallel.model.communication import joined
from ringspark.estimators.parallel.model.tensor.between import Between
from ringspark.estimators.parallel.model.tensor.draws import OwnDraws
from ringspark.estimators.parallel.model.tensor.grid import Grids

AXIS = "tensor"


@dataclass(frozen=True)
class Region:
    """What the cut layers of one network share.

    Attributes:
        collective: The ranks along the axis.
        between: How values enter and leave the regions.
        draws: Who draws what inside of them; None where each rank draws its own everywhere.
        grids: Makes grids of the ranks, for matrices that are cut along both dimensions.
    """

    collective: Collective
    between: Between
    draws: OwnDraws | None
    grids: Grids


class ColumnLinear(nn.Module):
    """A linear layer of which this rank computes some outputs: (..., in) -> (..., part of out)."""

    def __init__(self, layer: nn.Linear, region: Region, blocks: int = 1, joins: bool = False) -> None:
        super().__init__()
        self._region, self._joins, collective = region, joins, region.collective
        self._outputs = layer.out_features if blocks == 1 else None
        cut = Cut(AXIS, 0, blocks)
        self.weight = parameter_part(layer.weight, cut, collective.rank, collective.size)
        self.bias = (
            None if layer.bias is None else parameter_part(layer.bias, cut, collective.rank, collective.size)
        )
        self.cuts = {"weight": cut} if layer.bias is None else {"weight": cut, "bias": cut}

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        region = self._region
        out = F.linear(region.between.enter(x), self.weight, self.bias)
        if self._joins:
            return joined(out, -1, region.collective, self._outputs)
        if self.training and region.draws is not None:
            region.draws.begin(out.device)
        return out


class RowLinear(nn.Module):
    """A linear layer of which this rank has some inputs: (..., part of in) -> (..., out)."""

    def __init__(self, layer: nn.Linear, region: Region) -> None:
        super().__init__()
        self._region, collective = region, region.collective
        cut = Cut(AXIS, 1)
        self.weight = parameter_part(layer.weight, cut, collective.rank, collective.size)
        self.bias = layer.bias
        self.cuts = {"weight": cut}

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        region = self._region
        if region.draws is not None:
            region.draws.end()
        out = region.between.leave(F.linear(x, self.weight))
        return out if self.bias is None else out + self.bias.to(out.dtype)


class VocabularyEmbedding(nn.Module):
    """A table of embeddings of which this rank has some ids: (...) -> (..., dim)."""

    def __init__(self, layer: nn.Embedding, region: Region) -> None:
        super().__init__()
        if layer.max_norm is not None or layer.scale_grad_by_freq:
            raise ValueError(
                "a table of embeddings is cut by its ids, and max_norm or scale_grad_by_freq look at all of "
                "them; make the layer without, or leave it out of the plan"
            )
        self.collective, self.between = region.collective, region.between
        collective, cut = region.collective, Cut(AXIS, 0)
        lengths = [len(part_of(layer.weight, cut, r, collective.size)) for r in range(collective.size)]
        self._first = sum(lengths[: collective.rank])
        self.num_ids = sum(lengths)
        self._padding = layer.padding_idx
        self.weight = parameter_part(layer.weight, cut, collective.rank, collective.size)
        self.cuts = {"weight": cut}

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        local = ids - self._first
        is_here = (local >= 0) & (local < len(self.weight))
        # An id that no rank has must fail on all of them, as in a whole table, and not count as zeros.
        is_known = (ids >= 0) & (ids < self.num_ids)
        found = F.embedding(torch.where(is_here, local, torch.where(is_known, 0, -1)), self.weight)
        keeps = is_here if self._padding is None else is_here & (ids != self._padding)
        if self._padding is not None:
            # A padding row is looked up but never trained.
            found = torch.where(keeps.unsqueeze(-1), found, found.detach())
        return self.between.leave(found.masked_fill(~is_here.unsqueeze(-1), 0))
