"""Adds up the losses of several outputs."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch
from torch.nn.attention import SDPBackend, sdpa_kernel

from ringspark.estimators.parallel.layout import ClassShards
from ringspark.estimators.training.objective.heads import Head
from ringspark.estimators.training.objective.losses import (
    CallableLoss,
    ClassLoss,
    MemberLoss,
    NetworkLoss,
    RowLoss,
    RowWeights,
    resolve_loss,
)


def row_weights(loss: RowLoss, ignored: int | None) -> RowWeights | None:
    """Returns a function from labels to each row's weight in the loss's divisor, (batch,).

    Returns None if all weights are 1.
    """
    # None saves an all-reduce per step: the divisor is the number of rows.
    inner = loss.member if isinstance(loss, MemberLoss) else loss
    if isinstance(inner, CallableLoss):
        return inner.row_weights
    if not isinstance(inner, ClassLoss) or (ignored is None and not inner.weighs_classes):
        return None
    return inner.row_weights


class Criterion:
    """The losses of a module's outputs, one label per output.

    The loss of a global batch is the sum over k of heads[k].weight * means[k]. With the weight column w:

        weights = criterion.row_weights(labels)             # (batch, num_losses), None: ones
        divisor = all_reduce((weights * w[:, None]).sum(0))  # (num_losses,)
        means = (criterion.rows(outputs, labels) * w[:, None]).sum(0) / divisor
        loss = criterion.total(means)
    """

    def __init__(
        self, heads: Sequence[Head], device: torch.device | None = None, classes: ClassShards | None = None
    ) -> None:
        """Resolves the heads' losses.

        Args:
            classes: Logits that are sharded by class. The network returns only this rank's logits from now
                on, if the loss can use them.
        """
        self._losses = [resolve_loss(head.loss, device, head.quantiles) for head in heads]
        self._classes = classes
        if classes is not None and len(heads) == 1:
            self._losses = [classes.split_loss(loss) for loss in self._losses]
        self._factors = tuple(head.weight for head in heads)
        self._is_plain_sum = all(factor == 1 for factor in self._factors)
        pairs = zip(self._losses, heads, strict=True)
        self._row_weights = [row_weights(loss, head.ignored) for loss, head in pairs]

    @property
    def num_losses(self) -> int:
        return len(self._losses)

    def gather_classes(self, outputs: Sequence[torch.Tensor]) -> Sequence[torch.Tensor]:
        """Gathers the outputs of all classes, without gradients. Runs on every rank."""
        return outputs if self._classes is None else [self._classes.whole(o.detach()) for o in outputs]

    def gather_in_forward(self) -> AbstractContextManager[None]:
        return nullcontext() if self._classes is None else self._classes.gather_logits()

    @property
    def sees_network(self) -> bool:
        return any(isinstance(loss, NetworkLoss) for loss in self._losses)

    @contextmanager
    def differentiable(self) -> Iterator[None]:
        """Makes a pass twice differentiable, also in evaluation, if a loss sees the network."""
        if not self.sees_network:
            yield
            return
        # Fused attention has no second derivative.
        with torch.enable_grad(), sdpa_kernel(SDPBackend.MATH):
            yield

    def rows(
        self, outputs: Sequence[torch.Tensor], labels: Sequence[torch.Tensor], *network: Any
    ) -> torch.Tensor:
        """Returns the value of each loss per row, (batch, num_losses), before loss weights.

        A `NetworkLoss` also gets `network`: the module and its inputs.
        """
        kind = outputs[0].device.type
        is_on = torch.is_autocast_enabled(kind)
        with torch.autocast(kind, enabled=False) if is_on else nullcontext():
            columns = [
                loss(*pair, *network) if isinstance(loss, NetworkLoss) else loss(*pair)
                for loss, *pair in zip(self._losses, outputs, labels, strict=True)
            ]
        return columns[0].unsqueeze(1) if len(columns) == 1 else torch.stack(columns, dim=1)

    def row_weights(self, labels: Sequence[torch.Tensor]) -> torch.Tensor | None:
        """Returns each row's weight in each loss, (batch, num_losses); None on every rank if all are 1."""
        if all(weigh is None for weigh in self._row_weights):
            return None
        columns = [
            weigh(label) if weigh is not None else torch.ones(len(label), device=label.device)
            for weigh, label in zip(self._row_weights, labels, strict=True)
        ]
        return torch.stack([column.float() for column in columns], dim=1)

    def sum_layer_losses(
        self, values: torch.Tensor, labels: Sequence[torch.Tensor], weight: torch.Tensor | None
    ) -> torch.Tensor:
        """Returns what the losses of layers (`add_loss`) add to each output's summed loss, (num_losses,).

        `values`, (batch,), is the layers' loss of each row; `weight`, (batch,), is the weight column. Rows
        weigh as in the outputs' losses, so `total(result / divisors)` is the weighted mean of `values`.
        """
        weights = self.row_weights(labels)
        columns = values[:, None].float()
        columns = columns.expand(-1, self.num_losses) if weights is None else columns * weights
        if weight is not None:
            columns = columns * weight[:, None]
        return columns.sum(0) / (sum(self._factors) or 1.0)

    def total(self, means: torch.Tensor) -> torch.Tensor:
        """Returns the loss to minimise, from the mean of each loss, (num_losses,)."""
        return (means if self._is_plain_sum else means * means.new_tensor(self._factors)).sum()
