"""Only losses that are known to be equal are computed on sharded logits."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from ringspark.estimators.collectives.local_collective import LocalCollective
from ringspark.estimators.training.objective.criterion import Criterion
from ringspark.estimators.training.objective.heads import Head
from ringspark.extras.model_parallel.tensor import make_region, scores_of, shard_layers
from ringspark.extras.model_parallel.tensor.loss import _CrossEntropy
from ringspark.models import ModelSpec
from ringspark.models.transformer import TransformerLM

SIZES = {"vocab_size": 8, "max_seq_len": 4, "dim": 4, "depth": 1, "num_heads": 2}


class Focal(nn.CrossEntropyLoss):
    """User-defined loss that derives from a known loss."""

    def forward(self, outputs: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        return super().forward(outputs, labels).square()


class Tempered(TransformerLM):
    """Language model that changes the logits before it returns them."""


def _cut(network: nn.Module) -> nn.Module:
    shard_layers(network, make_region(LocalCollective()), {"tokens": "vocabulary"})
    return network


@pytest.mark.parametrize(
    ("network", "losses", "joins"),
    [
        (ModelSpec("transformer_lm", SIZES).build, [nn.CrossEntropyLoss()], False),
        (ModelSpec("transformer_lm", SIZES).build, [Focal()], True),
        (ModelSpec("transformer_lm", SIZES).build, [nn.CrossEntropyLoss(label_smoothing=0.1)], True),
        (ModelSpec("transformer_lm", SIZES).build, [nn.CrossEntropyLoss()] * 2, True),
        (lambda: Tempered(**SIZES), [nn.CrossEntropyLoss()], True),
    ],
    ids=["plain", "derived", "smoothed", "two outputs", "a user's network"],
)
def test_logits_stay_cut_only_for_plain_cross_entropy_of_a_known_network(
    network: object, losses: list[nn.Module], joins: bool
) -> None:
    module = _cut(network())  # type: ignore[operator]
    Criterion([Head(label="y", loss=loss) for loss in losses], classes=scores_of(module))
    assert vars(module)["scores"].gathers is joins


def test_labels_that_are_ignored_and_large_logits_are_those_of_torch() -> None:
    logits = (torch.randn(5, 4) * 1e3).requires_grad_()
    label = torch.tensor([0, -100, 3, 2, -100])
    kept = label != -100
    weights = torch.arange(1.0, 6.0)
    expected = nn.functional.cross_entropy(logits, label, reduction="none")
    (gradient,) = torch.autograd.grad((expected * weights).sum(), logits)
    found = _CrossEntropy.apply(logits, label, kept, LocalCollective(), 4)
    (own,) = torch.autograd.grad((found * weights).sum(), logits)
    assert torch.allclose(found, expected)
    assert torch.allclose(own, gradient)
