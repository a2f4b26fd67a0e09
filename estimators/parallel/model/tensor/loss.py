"""Cross entropy of logits of which each rank has those of some classes: nobody gathers them.

Shoeybi et al. 2019, section 3: batch x length x vocabulary logits are most of what a language model sends,
and of what it holds. The loss of a position needs of them the largest, the sum of exponentials and that of
its own class: one number each, which two small all-reduces make known to all ranks.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from torch.autograd.function import once_differentiable
from torch.nn import functional as F

from ringspark.estimators.collectives import Collective
from ringspark.estimators.parallel.cut import length_of_part
from ringspark.estimators.parallel.model.communication import joined
from ringspark.estimators.parallel.model.tensor.layers import VocabularyEmbedding


class Scores:
    """Compares values with the embeddings of all ids, of which each rank has some; in a network's `scores`.

    Attributes:
        joins: Whether all ranks get the logits of all ids, or each those of its own.
    """

    def __init__(self, table: VocabularyEmbedding) -> None:
        self.joins = True
        self.collective, self.num_ids = table.collective, table.num_ids

    def __deepcopy__(self, memo: dict[int, Any]) -> Scores:
        # A copy of a network stays in its gang, and is asked for its own outputs.
        copy = object.__new__(Scores)
        copy.__dict__ |= self.__dict__
        return copy

    def __call__(self, x: torch.Tensor, tokens: nn.Module) -> torch.Tensor:
        """Maps (batch, seq, dim) to (batch, seq, ids)."""
        assert isinstance(tokens, VocabularyEmbedding)
        own = F.linear(tokens.between.enter(x), tokens.weight)
        return joined(own, -1, self.collective, self.num_ids) if self.joins else own

    @contextmanager
    def joined(self) -> Iterator[None]:
        """Returns a context in which all ranks get all logits, for callers that are not the loss."""
        before, self.joins = self.joins, True
        try:
            yield
        finally:
            self.joins = before

    def whole(self, logits: torch.Tensor) -> torch.Tensor:
        """Returns the logits of all classes from those of this rank, (batch, own ids, ...), no gradient."""
        return logits if self.joins else joined(logits.detach(), 1, self.collective, self.num_ids)


def scores_of(module: nn.Module) -> Scores | None:
    """Returns how a network compares with a table that is cut; None if it does not."""
    found = vars(module).get("scores")
    return found if isinstance(found, Scores) else None


class CutCrossEntropy:
    """`nn.CrossEntropyLoss` with reduction "none", of this rank's classes. Runs on every rank."""

    def __init__(self, whole: nn.CrossEntropyLoss, scores: Scores) -> None:
        """Takes the place of a loss.

        Args:
            whole: The loss of all classes, without class weights and label smoothing.
        """
        assert whole.weight is None
        assert whole.label_smoothing == 0
        self._whole, self._scores = whole, scores

    def __call__(self, logits: torch.Tensor, label: torch.Tensor) -> torch.Tensor:
        """Returns the loss of each position, shaped like the labels; the same on all ranks.

        Args:
            logits: (batch, own classes, ...), fp32.
            label: (batch, ...) class numbers of all classes, or probabilities of all of them.

        Raises:
            IndexError: A label is no class.
        """
        scores = self._scores
        if scores.joins or label.is_floating_point():
            whole = logits if scores.joins else joined(logits, 1, scores.collective, scores.num_ids)
            losses: torch.Tensor = self._whole(whole, label)
            return losses
        ignored = self._whole.ignore_index
        kept = label != ignored
        if scores.collective.name != "stand-in":
            wrong = label[kept & ((label < 0) | (label >= scores.num_ids))]
            if len(wrong):
                raise IndexError(f"Target {int(wrong[0])} is out of bounds.")
        found: torch.Tensor = _CrossEntropy.apply(logits, label, kept, scores.collective, scores.num_ids)  # type: ignore[no-untyped-call]
        return found


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
        first = sum(length_of_part(num_ids, rank, collective.size) for rank in range(collective.rank))
        local = label - first
        is_here = kept & (local >= 0) & (local < logits.shape[1])
        local = local.where(is_here, 0).unsqueeze(1)  # (batch, 1, ...)
        largest = collective.all_reduce(logits.amax(1), op="max")
        shifted = logits - largest.unsqueeze(1)
        own = shifted.gather(1, local).squeeze(1).where(is_here, 0.0)
        exponentials = shifted.exp_()
        total, target = collective.all_reduce(torch.stack([exponentials.sum(1), own]))
        # Kept in place of the logits: the backward pass needs nothing else.
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
