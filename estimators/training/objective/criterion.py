"""How the losses of several outputs add up, and what each row counts in their means."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from ringspark.estimators.training.objective.losses import ClassLoss, MemberLoss, RowLoss, RowWeights


def row_weights(loss: RowLoss, label_range: tuple[float, float] | None = None) -> RowWeights | None:
    """What each row counts in the divisor of a loss: label -> (batch,) fp32; None where that is 1.

    Args:
        label_range: Smallest and largest label of all rows, where known. It spares the ranks a
            reduction per step: only labels that may be ignored need to be counted.
    """
    inner = loss.member if isinstance(loss, MemberLoss) else loss
    if not isinstance(inner, ClassLoss) or inner.counts_rows(label_range):
        return None
    return inner.row_weights


def ignored_label(loss: RowLoss, label_range: tuple[float, float] | None = None) -> int | None:
    """The class number of rows that a loss leaves out, and metrics must too; None where there is none.

    Args:
        label_range: Smallest and largest label of all rows, where known: a number outside of it needs
            nobody to look for it.
    """
    inner = loss.member if isinstance(loss, MemberLoss) else loss
    if not isinstance(inner, ClassLoss):
        return None
    if label_range is not None and not label_range[0] <= inner.ignored <= label_range[1]:
        return None
    return inner.ignored


class Criterion:
    """The losses of a module's outputs, one label each, and how they add up.

    The loss of a batch is sum over k of loss_weights[k] * mean[k], and mean[k], over the global
    batch, is the sum of column k of `rows` by the sum of column k of `row_weights`, both times the
    rows' weights from a weight column. So the caller reduces columns and calls `total` last:

        weights = criterion.row_weights(labels)             # (batch, num_losses), None: ones
        divisor = all_reduce((weights * w[:, None]).sum(0))  # (num_losses,)
        means = (criterion.rows(outputs, labels) * w[:, None]).sum(0) / divisor
        loss = criterion.total(means)
    """

    def __init__(
        self,
        losses: Sequence[RowLoss],
        loss_weights: Sequence[float] | None = None,
        label_ranges: Sequence[tuple[float, float] | None] | None = None,
    ) -> None:
        """Stores the losses in the order of outputs and labels.

        Args:
            loss_weights: One factor per loss, each 1 if left out.
            label_ranges: One per loss, see `row_weights`.

        Raises:
            ValueError: The lengths differ.
        """
        self.losses = tuple(losses)
        self.loss_weights = tuple(loss_weights) if loss_weights is not None else (1.0,) * len(self.losses)
        ranges = list(label_ranges) if label_ranges is not None else [None] * len(self.losses)
        for kind, given in (("loss weights", self.loss_weights), ("label ranges", ranges)):
            if len(given) != len(self.losses):
                raise ValueError(
                    f"a criterion of {len(self.losses)} losses needs as many {kind}, got {len(given)}"
                )
        self._row_weights = [row_weights(*pair) for pair in zip(self.losses, ranges, strict=True)]

    @property
    def num_losses(self) -> int:
        return len(self.losses)

    def rows(self, outputs: Sequence[torch.Tensor], labels: Sequence[torch.Tensor]) -> torch.Tensor:
        """Values per row and loss, (batch, num_losses), before loss weights.

        Raises:
            ValueError: There are not as many outputs and labels as losses.
        """
        if not len(outputs) == len(labels) == self.num_losses:
            raise ValueError(
                f"each output needs a label and a loss, got {len(outputs)} outputs, {len(labels)} labels and "
                f"{self.num_losses} losses; drop outputs in the model, or name more label columns"
            )
        with torch.autocast(outputs[0].device.type, enabled=False):
            columns = [
                loss(*pair) for loss, *pair in zip(self.losses, outputs, labels, strict=True)
            ]  # each (batch,)
        return torch.stack(columns, dim=1)

    def row_weights(self, labels: Sequence[torch.Tensor]) -> torch.Tensor | None:
        """What each row counts in each loss, (batch, num_losses); None, on every rank, if always 1."""
        if all(weigh is None for weigh in self._row_weights):
            return None
        columns = [
            weigh(label) if weigh is not None else torch.ones(len(label), device=label.device)
            for weigh, label in zip(self._row_weights, labels, strict=True)
        ]
        return torch.stack([column.float() for column in columns], dim=1)

    def total(self, means: torch.Tensor) -> torch.Tensor:
        """The loss that is minimised, from the mean of each loss, (num_losses,)."""
        return (means * means.new_tensor(self.loss_weights)).sum()
