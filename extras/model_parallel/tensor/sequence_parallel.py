"""Activations between sharded layers: replicated, or sharded by tokens (sequence parallelism).

Korthikanti et al. 2022, "Reducing Activation Recomputation in Large Transformer Models": an all-gather enters
a region and a reduce-scatter leaves it. The gradients of parameters between the regions are then partial.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import nn

from ringspark.estimators.collectives import Collective
from ringspark.estimators.collectives.base import all_reduce_together
from ringspark.estimators.parallel.shard_spec import shard_length, shard_view
from ringspark.extras.model_parallel.communication import (
    all_gather,
    all_gather_for_shards,
    all_reduce,
    all_reduce_gradient,
    reduce_scatter,
    scale_gradient,
)
from ringspark.models.whole_rows import WholeRows

# Dimension of tokens in (batch, seq, dim).
_TOKENS = 1


class RegionBoundary:
    """Boundary of a region of sharded layers; all ranks have equal activations outside the region."""

    def __init__(self, collective: Collective) -> None:
        self.collective = collective

    def enter(self, x: torch.Tensor) -> torch.Tensor:
        """Returns all tokens of activations from outside the region; sums the gradients over the ranks."""
        return all_reduce_gradient(x, self.collective)

    def leave(self, x: torch.Tensor) -> torch.Tensor:
        """Sums a partial value over the ranks, and returns it in the form used outside the region."""
        return all_reduce(x, self.collective)


class SequenceBoundary(RegionBoundary):
    """Boundary whose ranks have the activations of their own tokens outside the region.

    `length` is the number of all tokens of a row. Uneven shards do not determine this number.
    """

    length = 0

    def enter(self, x: torch.Tensor) -> torch.Tensor:
        own = shard_length(self.length, self.collective.rank, self.collective.size)
        if x.shape[_TOKENS] != own:
            raise ValueError(
                f"a layer that 'tensor' shards got {x.shape[_TOKENS]:,} tokens, but of the {self.length:,} "
                f"tokens of a row this worker has {own:,}; compute the embeddings by `rows.embedded`, once "
                "per forward pass, or set sequence_parallel=False"
            )
        return all_gather_for_shards(x, _TOKENS, self.collective, self.length)

    def leave(self, x: torch.Tensor) -> torch.Tensor:
        return reduce_scatter(x, _TOKENS, self.collective)


class SequenceShardedRows(WholeRows):
    """Replaces a network's `rows` under sequence parallelism: unsharded layers compute this rank's tokens.

    If the embedding table is sharded too, all ranks look up all tokens.
    """

    def __init__(self, rows: WholeRows, boundary: SequenceBoundary, *, is_table_sharded: bool) -> None:
        self._rows, self._boundary, self._is_table_sharded = rows, boundary, is_table_sharded

    def own(self, x: torch.Tensor, dim: int) -> torch.Tensor:
        ranks = self._boundary.collective
        return shard_view(self._rows.own(x, dim), dim, ranks.rank, ranks.size)

    def embedded(self, table: torch.nn.Module, ids: torch.Tensor) -> torch.Tensor:
        tokens = self._rows.own(ids, 1)
        self._boundary.length = tokens.shape[1]
        found: torch.Tensor = table(tokens if self._is_table_sharded else self.own(ids, 1))
        return found

    def mask(self, mask: torch.Tensor | None, seq: int) -> torch.Tensor | None:
        return self._rows.mask(mask, seq)

    def told(self, tokens: torch.Tensor | None, seq: int) -> torch.Tensor | None:
        return self._rows.told(tokens, seq)

    def pool(self, x: torch.Tensor, tokens: torch.Tensor | None, seq: int) -> torch.Tensor:
        # After pooling, every rank has 1/n of the gradient; see `alike`.
        own = scale_gradient(x, self._boundary.collective.size)
        return self._rows.pool(self._gather(own), tokens, seq)

    def alike(self, outputs: torch.Tensor) -> torch.Tensor:
        # All ranks compute the same, which must count once in the sum over ranks.
        return scale_gradient(self._rows.alike(outputs), 1 / self._boundary.collective.size)

    def joined(self, x: torch.Tensor, dim: int, seq: int) -> torch.Tensor:
        # Scores of a sharded table have all tokens already.
        whole = x if self._is_table_sharded else self._gather(x)
        return self._rows.joined(whole, dim, seq)

    def _gather(self, x: torch.Tensor) -> torch.Tensor:
        return all_gather(x, _TOKENS, self._boundary.collective, self._boundary.length)


def add_partial_gradients(parameters: Sequence[nn.Parameter], collective: Collective) -> None:
    """All-reduces the gradients after the last backward pass of a step. Runs on every rank."""
    for parameter in parameters:
        if parameter.grad is not None and parameter.grad.is_sparse:
            # Ranks look up different rows.
            parameter.grad = parameter.grad.to_dense()
    gradients = [p.grad for p in parameters if p.grad is not None]
    for dtype in dict.fromkeys(gradient.dtype for gradient in gradients):
        own = [gradient for gradient in gradients if gradient.dtype == dtype]
        torch._foreach_copy_(own, all_reduce_together(own, collective))
