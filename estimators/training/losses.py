"""Losses per row, so that weights and uneven shards are exact.

Every loss maps (output, label) to one value per row, shape (batch,). The trainer sums them, times
the rows' weights, and divides by the weight of the GLOBAL batch.
"""

from __future__ import annotations

import copy
from collections.abc import Callable

import torch
from torch import nn
from torch.nn import functional

RowLoss = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]


def _match(output: torch.Tensor, label: torch.Tensor) -> torch.Tensor:
    """Drops or adds the trailing unit dimension between (batch, 1) and (batch,)."""
    if output.dim() == label.dim() + 1 and output.shape[-1] == 1:
        return output.squeeze(-1)
    if label.dim() == output.dim() + 1 and label.shape[-1] == 1:
        return output.unsqueeze(-1)
    return output


def _elementwise(function: Callable[..., torch.Tensor]) -> RowLoss:
    def loss(output: torch.Tensor, label: torch.Tensor) -> torch.Tensor:
        output = _match(output, label)
        if output.shape != label.shape:
            # PyTorch would broadcast, and hold every prediction against every row's label.
            raise ValueError(
                f"the loss needs output and label of one shape, got {tuple(output.shape)} and "
                f"{tuple(label.shape)}; change the last layer, or take a '..._per_member' loss"
            )
        values = function(output, label.to(output.dtype), reduction="none")
        return values.flatten(1).mean(1) if values.dim() > 1 else values

    return loss


def _cross_entropy(output: torch.Tensor, label: torch.Tensor) -> torch.Tensor:
    return functional.cross_entropy(output, label.long(), reduction="none")


def _per_member(loss: RowLoss) -> RowLoss:
    """For ensembles: each member's output against the row's label, then the mean over members.

    Takes (batch, members, ...) outputs, as ensembles give in training, and (batch, ...) ones, the
    members' mean, as they give in evaluation.
    """

    def member_loss(output: torch.Tensor, label: torch.Tensor) -> torch.Tensor:
        if output.dim() < 3:
            return loss(output, label)
        batch, members = output.shape[:2]
        rows = loss(output.flatten(0, 1), label.repeat_interleave(members, dim=0))
        return rows.view(batch, members).mean(1)

    return member_loss


# The loss itself is computed in fp32 also under autocast: torch's autocast lists say so.
LOSSES: dict[str, RowLoss] = {
    "cross_entropy": _cross_entropy,
    "cross_entropy_per_member": _per_member(_cross_entropy),
    "bce_with_logits": _elementwise(functional.binary_cross_entropy_with_logits),
    "bce_with_logits_per_member": _per_member(_elementwise(functional.binary_cross_entropy_with_logits)),
    "mse": _elementwise(functional.mse_loss),
    "mse_per_member": _per_member(_elementwise(functional.mse_loss)),
    "l1": _elementwise(functional.l1_loss),
    "huber": _elementwise(functional.huber_loss),
}

DEFAULT_LOSS = {"regression": "mse", "any": "mse"}


def default_loss(task: str, output_width: int) -> str:
    """The loss that `loss="auto"` stands for.

    Args:
        task: "classification", "regression" or "any".
        output_width: Size of the module's last output dimension.
    """
    if task == "classification":
        return "bce_with_logits" if output_width == 1 else "cross_entropy"
    return DEFAULT_LOSS[task]


def from_user(loss: Callable[..., torch.Tensor], device: torch.device | None = None) -> RowLoss:
    """A user's loss as a per-row loss; `nn` losses lose their reduction and move to `device`.

    Raises:
        ValueError: When called, if the loss gives one number for many rows.
    """
    takes_classes = isinstance(loss, nn.CrossEntropyLoss | nn.NLLLoss)
    if isinstance(loss, nn.Module):
        loss = copy.deepcopy(loss).to(device)
        if hasattr(loss, "reduction"):
            loss.reduction = "none"  # type: ignore[assignment]

    def row_loss(output: torch.Tensor, label: torch.Tensor) -> torch.Tensor:
        # Spark's labels are doubles; classes must be integers, unless they are probabilities.
        if takes_classes and label.dim() < output.dim():
            label = label.long()
        output = output if takes_classes else _match(output, label)
        values = loss(output, label)
        if values.dim() == 0 or values.shape[0] != label.shape[0]:
            raise ValueError(
                f"loss must return one value per row, shape ({label.shape[0]},), got {tuple(values.shape)}; "
                "drop the mean over rows (reduction='none')"
            )
        return values.flatten(1).mean(1) if values.dim() > 1 else values

    return row_loss
