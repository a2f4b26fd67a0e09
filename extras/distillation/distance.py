"""The distance of a network's outputs from its teacher's outputs, per row."""

from __future__ import annotations

from typing import Literal

import torch
from torch.nn import functional

from ringspark.estimators.training.settings.choices import Task
from ringspark.estimators.training.settings.config import TrainConfig

Compared = Literal["classes", "labels", "values"]
"""What a distance compares: the probabilities of classes or of independent labels, or values."""

_OF_CLASSES = ("cross_entropy", "CrossEntropyLoss")
# Each logit is a choice of two classes by itself.
_OF_LABELS = ("bce_with_logits", "BCEWithLogitsLoss")


def compared_by(task: Task, loss: str) -> Compared:
    """Returns what the distance compares for the label's loss, given by its name in `TrainConfig.losses`."""
    if loss.startswith(_OF_LABELS):
        return "labels"
    return "classes" if task == "classification" or loss.startswith(_OF_CLASSES) else "values"


def distil(
    config: TrainConfig,
    rows: torch.Tensor,
    outputs: torch.Tensor,
    teacher: torch.Tensor,
    row_weights: torch.Tensor | None,
) -> torch.Tensor:
    """Returns alpha * distance + (1 - alpha) * the label's loss, (batch, 1).

    Args:
        rows: The label's loss of each row, (batch, 1).
        outputs: (batch,), (batch, width), or (batch, members, width) of an ensemble in training.
        teacher: The teacher's outputs, (batch,) or (batch, width).
        row_weights: Weight of each row in the divisor, (batch, 1): 0 if the label is ignored. None: 1.
    """
    compared = compared_by(config.task, config.losses[0])
    if compared == "values":
        distance = squared_distance(outputs, teacher)
    else:
        measure = label_distance if compared == "labels" else class_distance
        distance = measure(outputs, teacher, config.temperature)
    if row_weights is not None:
        distance = distance * row_weights[:, 0]
    return config.alpha * distance[:, None] + (1 - config.alpha) * rows


def class_distance(outputs: torch.Tensor, teacher: torch.Tensor, temperature: float) -> torch.Tensor:
    """Returns temperature^2 * KL(teacher || network) of the softened class probabilities, (batch,).

    The factor keeps the size of the gradients when the temperature changes. For an ensemble, it is the mean
    of the members' distances.
    """
    ours, theirs = (_log_probabilities(logits, temperature) for logits in (outputs, teacher))
    if ours.dim() > theirs.dim():
        theirs = theirs.unsqueeze(1).expand_as(ours)
    found = functional.kl_div(ours, theirs, reduction="none", log_target=True).sum(-1)
    return temperature**2 * found.flatten(1).mean(1) if found.dim() > 1 else temperature**2 * found


def label_distance(outputs: torch.Tensor, teacher: torch.Tensor, temperature: float) -> torch.Tensor:
    """Returns the mean of `class_distance` over the logits of independent labels, (batch,)."""
    outputs = outputs if outputs.dim() > 1 else outputs.unsqueeze(1)
    return class_distance(outputs.unsqueeze(-1), teacher.reshape(len(teacher), -1, 1), temperature)


def squared_distance(outputs: torch.Tensor, teacher: torch.Tensor) -> torch.Tensor:
    """Returns the mean squared difference of each row, (batch,)."""
    theirs = teacher.reshape(len(teacher), -1)  # (batch, width)
    if outputs.dim() == 3:  # of an ensemble
        theirs = theirs.unsqueeze(1)
    else:
        outputs = outputs.reshape(len(outputs), -1)
    return (outputs - theirs).square().flatten(1).mean(1)


def _log_probabilities(logits: torch.Tensor, temperature: float) -> torch.Tensor:
    logits = logits.float()
    if logits.dim() == 1:
        logits = logits.unsqueeze(1)
    if logits.shape[-1] == 1:  # log odds z equal the two logits (0, z)
        logits = torch.cat([torch.zeros_like(logits), logits], dim=-1)
    return functional.log_softmax(logits / temperature, dim=-1)
