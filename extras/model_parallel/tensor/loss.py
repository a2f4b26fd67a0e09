"""Cross entropy of logits that are sharded by class, without gathering them.

Shoeybi et al. 2019, section 3: the loss of a position only needs the maximum of its logits, the sum of
exponentials and the logit of its label, which two small all-reduces compute.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.autograd.function import once_differentiable
from torch.nn import functional as F

from ringspark.estimators.collectives import Collective
from ringspark.estimators.parallel.shard_spec import shard_range
from ringspark.estimators.training.objective.losses import ClassLoss
from ringspark.extras.model_parallel.communication import all_gather
from ringspark.extras.model_parallel.fake_collective import FakeCollective
from ringspark.extras.model_parallel.tensor.layers import VocabularyEmbedding
from ringspark.models.transformer import TransformerLM


class ShardedScores:
    """Computes a language model's logits from a sharded embedding table; replaces the model's `scores`.

    With `gathers` each rank gets the logits of all ids, else only of the ids in the rank's shard.
    """

    def __init__(self, table: VocabularyEmbedding) -> None:
        self.gathers = True
        self.collective, self.num_ids = table.collective, table.num_ids

    def __call__(self, x: torch.Tensor, tokens: nn.Module) -> torch.Tensor:
        assert isinstance(tokens, VocabularyEmbedding)
        own = F.linear(tokens.boundary.enter(x), tokens.weight)
        return all_gather(own, -1, self.collective, self.num_ids) if self.gathers else own

    @contextmanager
    def gather_logits(self) -> Iterator[None]:
        """Returns a context in which all ranks get all logits, for callers other than the loss."""
        before, self.gathers = self.gathers, True
        try:
            yield
        finally:
            self.gathers = before

    def whole(self, logits: torch.Tensor) -> torch.Tensor:
        return logits if self.gathers else all_gather(logits, 1, self.collective, self.num_ids)

    def split_loss(self, loss: Any) -> Any:
        whole = loss.unreduced if isinstance(loss, ClassLoss) else None
        # A subclass may compute something else.
        if type(whole) is not nn.CrossEntropyLoss or whole.weight is not None or whole.label_smoothing:
            return loss
        self.gathers = False
        return loss.with_function(partial(self._cross_entropy, whole))

    def _cross_entropy(
        self, unsharded: nn.CrossEntropyLoss, logits: torch.Tensor, label: torch.Tensor
    ) -> torch.Tensor:
        """Returns each position's loss, equal on all ranks; `logits` are fp32, with this rank's classes."""
        if self.gathers or label.is_floating_point():
            losses: torch.Tensor = unsharded(self.whole(logits), label)
            return losses
        kept = label != unsharded.ignore_index
        if self.collective.name != FakeCollective.name:
            wrong = label[kept & ((label < 0) | (label >= self.num_ids))]
            if len(wrong):
                raise IndexError(f"Target {int(wrong[0])} is out of bounds.")
        found: torch.Tensor = _CrossEntropy.apply(logits, label, kept, self.collective, self.num_ids)  # type: ignore[no-untyped-call]
        return found


def scores_of(module: nn.Module) -> ShardedScores | None:
    """Returns the sharded scores of a `TransformerLM`; another network may return more than the logits."""
    found = vars(module).get("scores")
    return found if type(module) is TransformerLM and isinstance(found, ShardedScores) else None


class _CrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        logits: torch.Tensor,
        label: torch.Tensor,
        kept: torch.Tensor,
        collective: Collective,
        num_ids: int,
    ) -> torch.Tensor:
        first, _ = shard_range(num_ids, collective.rank, collective.size)
        local = label - first
        is_here = kept & (local >= 0) & (local < logits.shape[1])
        local = local.where(is_here, 0).unsqueeze(1)  # (batch, 1, ...)
        largest = collective.all_reduce(logits.amax(1), op="max")
        shifted = logits - largest.unsqueeze(1)
        own = shifted.gather(1, local).squeeze(1).where(is_here, 0.0)
        exponentials = shifted.exp_()
        total, target = collective.all_reduce(torch.stack([exponentials.sum(1), own]))
        # Saved instead of the logits; the backward pass needs nothing else.
        ctx.save_for_backward(exponentials.div_(total.unsqueeze(1)), local, is_here, kept)
        losses: torch.Tensor = (total.log() - target).where(kept, 0.0)
        return losses

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:
        softmax, local, is_here, kept = ctx.saved_tensors
        gradient = gradient.where(kept, 0.0).unsqueeze(1)
        result = softmax * gradient
        result.scatter_add_(1, local, -gradient.where(is_here.unsqueeze(1), 0.0))
        return result, None, None, None, None
