"""Sharded layers: a pair of a column-sharded and a row-sharded layer needs no communication in between."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F

from ringspark.estimators.collectives import Collective
from ringspark.estimators.parallel.shard_spec import ShardSpec, shard_parameter, shard_range
from ringspark.extras.model_parallel.communication import all_gather
from ringspark.extras.model_parallel.tensor.grid import Grids
from ringspark.extras.model_parallel.tensor.random_state import RankRandomState
from ringspark.extras.model_parallel.tensor.sequence_parallel import RegionBoundary
from ringspark.models.lora import Adapter, adapter_product, has_adapter, hold_adapter

AXIS = "tensor"


@dataclass(frozen=True)
class Region:
    """Objects that all sharded layers of one network share.

    Attributes:
        boundary: Operations at the ends of a region, the layers from a column-sharded to a row-sharded one.
        random_state: Random streams inside regions; None if each rank has its own stream everywhere.
        grids: Makes grids of the ranks, for matrices that are sharded along both dimensions.
    """

    collective: Collective
    boundary: RegionBoundary
    random_state: RankRandomState | None
    grids: Grids


def is_transposed(layer: nn.Module) -> bool:
    """Returns whether a linear layer stores its weight as (in, out), as `Conv1D` of transformers does."""
    return type(layer).__name__ == "Conv1D" and type(layer).__module__.startswith("transformers.")


class ColumnLinear(nn.Module):
    """A linear layer with this rank's shard of the outputs: (..., in) -> (..., own out)."""

    def __init__(self, layer: Any, region: Region, blocks: int = 1, gathers: bool = False) -> None:
        super().__init__()
        self._region, self._gathers, collective = region, gathers, region.collective
        self._is_transposed = is_transposed(layer)
        dim = int(self._is_transposed)
        self._outputs = layer.weight.shape[dim]
        spec = ShardSpec(AXIS, dim, blocks)
        self.weight = shard_parameter(layer.weight, spec, collective.rank, collective.size)
        self.bias, self.cuts = None, {"weight": spec}
        if layer.bias is not None:
            spec = ShardSpec(AXIS, 0, blocks)
            self.bias = shard_parameter(layer.bias, spec, collective.rank, collective.size)
            self.cuts["bias"] = spec

    def adapt(self, adapter: Adapter) -> None:
        """Holds the adapter's A, and the shard of B with this rank's outputs."""
        spec, ranks = replace(self.cuts["weight"], dim=0), self._region.collective
        own = shard_parameter(adapter.second, spec, ranks.rank, ranks.size)
        hold_adapter(self, replace(adapter, second=own))
        self.cuts["lora_B"] = spec

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        region = self._region
        weight = self.weight.t() if self._is_transposed else self.weight
        out = F.linear(region.boundary.enter(x), weight, self.bias)
        if has_adapter(self):
            if region.random_state is not None:
                # All ranks have the same inputs, also of a region's later layers, and drop the same ones.
                region.random_state.end()
            out = out + adapter_product(self, x, region.boundary.enter)
        if self._gathers:
            return all_gather(out, -1, region.collective, self._outputs)
        if self.training and region.random_state is not None:
            region.random_state.begin(out.device)
        return out


class RowLinear(nn.Module):
    """A linear layer with this rank's shard of the inputs: (..., own in) -> (..., out)."""

    def __init__(self, layer: Any, region: Region) -> None:
        super().__init__()
        self._region, collective = region, region.collective
        self._is_transposed = is_transposed(layer)
        spec = ShardSpec(AXIS, int(not self._is_transposed))
        self.weight = shard_parameter(layer.weight, spec, collective.rank, collective.size)
        self.bias = layer.bias
        self.cuts = {"weight": spec}

    def adapt(self, adapter: Adapter) -> None:
        """Holds the shard of the adapter's A with this rank's inputs, and B."""
        spec, ranks = replace(self.cuts["weight"], dim=1), self._region.collective
        own = shard_parameter(adapter.first, spec, ranks.rank, ranks.size)
        hold_adapter(self, replace(adapter, first=own))
        self.cuts["lora_A"] = spec

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        region = self._region
        # First, because dropout of the inputs belongs to the region.
        added = adapter_product(self, x, region.boundary.leave) if has_adapter(self) else None
        if region.random_state is not None:
            region.random_state.end()
        weight = self.weight.t() if self._is_transposed else self.weight
        out = region.boundary.leave(F.linear(x, weight))
        if added is not None:
            out = out + added
        return out if self.bias is None else out + self.bias.to(out.dtype)


class ColumnEmbedding(nn.Module):
    """An embedding table with this rank's columns, such as biases per head: (...) -> (..., own dim)."""

    def __init__(self, layer: nn.Embedding, region: Region) -> None:
        super().__init__()
        if layer.max_norm is not None:
            raise ValueError("max_norm needs whole rows of an embedding table; leave it out")
        self._padding, spec = layer.padding_idx, ShardSpec(AXIS, 1)
        self.weight = shard_parameter(layer.weight, spec, region.collective.rank, region.collective.size)
        self.cuts = {"weight": spec}

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        return F.embedding(ids, self.weight, self._padding)


class VocabularyEmbedding(nn.Module):
    """An embedding table with this rank's range of ids: (...) -> (..., dim)."""

    def __init__(self, layer: nn.Embedding, region: Region) -> None:
        super().__init__()
        if layer.max_norm is not None or layer.scale_grad_by_freq:
            raise ValueError(
                "an embedding table is sharded by ids, but max_norm and scale_grad_by_freq need all ids; "
                "leave them out, or leave the layer out of the plan"
            )
        self.collective, self.boundary = region.collective, region.boundary
        collective, spec = region.collective, ShardSpec(AXIS, 0)
        self.num_ids = len(layer.weight)
        self._first, _ = shard_range(self.num_ids, collective.rank, collective.size)
        self._padding = layer.padding_idx
        self.weight = shard_parameter(layer.weight, spec, collective.rank, collective.size)
        self.cuts = {"weight": spec}

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        local = ids - self._first
        is_here = (local >= 0) & (local < len(self.weight))
        # An id that no rank has must fail on all ranks, as with a whole table, instead of giving zeros.
        is_known = (ids >= 0) & (ids < self.num_ids)
        found = F.embedding(torch.where(is_here, local, torch.where(is_known, 0, -1)), self.weight)
        keeps = is_here if self._padding is None else is_here & (ids != self._padding)
        if self._padding is not None:
            # A padding row is looked up but never trained.
            found = torch.where(keeps.unsqueeze(-1), found, found.detach())
        return self.boundary.leave(found.masked_fill(~is_here.unsqueeze(-1), 0))
