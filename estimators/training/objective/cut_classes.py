"""Which losses can do with the logits of this rank's classes, where ranks have others."""

from __future__ import annotations

from torch import nn

from ringspark.estimators.parallel.model.tensor import CutCrossEntropy, Scores
from ringspark.estimators.training.objective.losses import ClassLoss, RowLoss


def of_cut_classes(loss: RowLoss, scores: Scores) -> RowLoss:
    """Returns the loss of logits that are cut by classes, and has the network return such.

    Plain cross entropy can; another loss stays as it is, and the network gathers the logits for it.

    Args:
        scores: How the network compares with the table of classes.
    """
    whole = loss.unreduced if isinstance(loss, ClassLoss) else None
    # A class derived from it may compute something else.
    if type(whole) is not nn.CrossEntropyLoss or whole.weight is not None or whole.label_smoothing:
        return loss
    assert isinstance(loss, ClassLoss)
    scores.joins = False
    return loss.computed_by(CutCrossEntropy(whole, scores))
