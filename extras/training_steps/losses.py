"""Losses that compare each row with the rows of all ranks; each returns one value per row, (rows,)::

    z = step.module(*step.inputs)
    step.minimize(step.mean(nt_xent(step, first, second)))

N ranks compute the loss, and the gradients, of one rank with all rows.
"""

from __future__ import annotations

import torch
from torch.nn import functional as F

from ringspark.extras.training_steps.step import Step


def info_nce(
    step: Step, queries: torch.Tensor, keys: torch.Tensor, temperature: float | torch.Tensor = 0.07
) -> torch.Tensor:
    """Returns InfoNCE (van den Oord et al. 2018) of each query.

    It is the cross entropy of finding the key of the query's own row among the keys of all rows, by cosine
    similarity. Runs on every rank. `queries` and `keys` are (rows, dim).
    """
    with _fp32(queries):
        every = F.normalize(step.gather(keys.float()), dim=1)
        scores = F.normalize(queries.float(), dim=1) @ every.T / temperature  # (rows, total_rows)
        return F.cross_entropy(scores, step.positions, reduction="none")


def nt_xent(
    step: Step, first: torch.Tensor, second: torch.Tensor, temperature: float | torch.Tensor = 0.5
) -> torch.Tensor:
    """Returns NT-Xent (Chen et al. 2020, SimCLR) of two views of each row: the mean over both views.

    Runs on every rank. `first` and `second` are (rows, dim). Each view is compared with both views of all
    rows.
    """
    with _fp32(first):
        views = [F.normalize(view.float(), dim=1) for view in (first, second)]
        every = [step.gather(view) for view in views]
        own = step.positions[:, None]
        losses = []
        for here, others in ((0, 1), (1, 0)):
            alike = views[here] @ every[here].T / temperature
            # A view is not compared with itself.
            alike = alike.scatter(1, own, -torch.inf)
            scores = torch.cat([views[here] @ every[others].T / temperature, alike], dim=1)
            losses.append(F.cross_entropy(scores, own[:, 0], reduction="none"))
        return (losses[0] + losses[1]) / 2


def hard_triplet(
    step: Step, embeddings: torch.Tensor, classes: torch.Tensor, margin: float = 0.2
) -> torch.Tensor:
    """Returns the batch-hard triplet loss (Hermans et al. 2017) of each row.

    It is the distance to the farthest row of the same class, minus the distance to the nearest row of another
    class, plus `margin`, and at least 0. It is 0 for a row that is alone in its class, or if all rows have
    one class. Runs on every rank. `embeddings` is (rows, dim), `classes` (rows,).
    """
    with _fp32(embeddings):
        embeddings = embeddings.float()
        every, kinds = step.gather(embeddings), step.gather(classes)
        squares = (embeddings[:, None] - every[None]).square().sum(2)
        # The root has no derivative at 0, the distance of a row to itself.
        distances = torch.where(squares > 0, squares.clamp(min=1e-12).sqrt(), squares)
        same = classes[:, None] == kinds[None]
        itself = torch.zeros_like(same).scatter(1, step.positions[:, None], True)
        positive = distances.masked_fill(~same | itself, -torch.inf).amax(1)
        negative = distances.masked_fill(same, torch.inf).amin(1)
        is_complete = positive.isfinite() & negative.isfinite()
        return torch.where(is_complete, positive - negative + margin, torch.zeros_like(positive)).clamp(min=0)


def _fp32(values: torch.Tensor) -> torch.autocast:
    """Similarities lose too many digits in 16 bits."""
    return torch.autocast(values.device.type, enabled=False)
