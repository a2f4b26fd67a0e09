"""One micro-batch: gradients stay on the network, and everything else is returned."""

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import nn

from ringspark.estimators.collectives.local_collective import LocalCollective
from ringspark.estimators.parallel.base import GradientSync
from ringspark.estimators.training.feed import Batch
from ringspark.estimators.training.objective.criterion import Criterion
from ringspark.estimators.training.objective.heads import Head
from ringspark.estimators.training.precision import LossScaler
from ringspark.estimators.training.settings.config import TrainConfig
from ringspark.estimators.training.step import Recipe, forward_backward, global_weights
from ringspark.models.reports import add_loss

CPU = torch.device("cpu")
ROWS = 7

COMMON: dict[str, Any] = {"shards_uri": "", "run_uri": "", "input_columns": ("x",), "reader": "arrow"}


def _recipe(config: TrainConfig, *heads: Head) -> Recipe:
    return Recipe(config=config, criterion=Criterion(heads), scaler=LossScaler("fp32", CPU), device=CPU)


ONE_HEAD = _recipe(TrainConfig(**COMMON, label_columns=("y",)), Head(label="y", loss="mse", weight=2.0))
CLASSES = nn.CrossEntropyLoss(weight=torch.tensor([1.0, 2.0, 3.0, 0.5]), ignore_index=3)
TWO_HEADS = _recipe(
    TrainConfig(**COMMON, label_columns=("y", "z"), losses=("cross_entropy", "mse"), loss_weights=(2.0, 0.5)),
    Head(label="y", loss=CLASSES, weight=2.0, width=4, ignored=3),
    Head(label="z", loss="mse", weight=0.5),
)


def _run(recipe: Recipe, network: nn.Module, batch: Batch, keeps_outputs: bool = False) -> list[Any]:
    """Runs three micro-batches."""
    sync = GradientSync(network, torch.optim.SGD(network.parameters()))
    divisor = global_weights(recipe, batch, ROWS, LocalCollective())
    parts = batch.split(3)
    return [forward_backward(recipe, sync, part, divisor, keeps_outputs=keeps_outputs) for part in parts]


def _assert_gradients_of(loss: torch.Tensor, network: nn.Module) -> None:
    expected = torch.autograd.grad(loss, list(network.parameters()))
    for parameter, gradient in zip(network.parameters(), expected, strict=True):
        torch.testing.assert_close(parameter.grad, gradient)


@pytest.mark.parametrize("keeps_outputs", [True, False])
def test_micro_batches_return_their_rows_and_add_up_to_the_weighted_mean(keeps_outputs: bool) -> None:
    network = nn.Linear(3, 1)
    x, y, w = torch.randn(ROWS, 3), torch.randn(ROWS), torch.rand(ROWS)
    seen = _run(ONE_HEAD, network, Batch(inputs=(x,), labels=(y,), weight=w), keeps_outputs)
    rows = (network(x)[:, 0] - y).square() * w
    _assert_gradients_of(2.0 * rows.sum() / w.sum(), network)
    torch.testing.assert_close(torch.cat([part.losses for part in seen]).sum(), rows.sum())
    torch.testing.assert_close(torch.cat([part.weights for part in seen]).sum(), w.sum())
    kept = [pair for part in seen for pair in part.pairs]
    assert [len(label) for _, label in kept] == ([3, 2, 2] if keeps_outputs else [])
    assert not any(output.requires_grad for output, _ in kept)


@pytest.mark.parametrize("own_rows", [1, 3, ROWS])
def test_out_of_step_rows_of_weight_1_count_as_rows_without_a_weight(own_rows: int) -> None:
    """Holds for any share of rows per rank. Doubled weights give the same mean."""
    batch = Batch(inputs=(torch.zeros(own_rows, 3),), labels=(torch.zeros(own_rows),), weight=None)
    plain = global_weights(ONE_HEAD, batch, ROWS, None)
    for weight in (1.0, 2.0):
        weighted = replace(batch, weight=torch.full((own_rows,), weight))
        assert global_weights(ONE_HEAD, weighted, ROWS, None).tolist() == [plain * weight]  # type: ignore[union-attr, operator]


class Adds(nn.Module):
    """Network with two outputs and an added loss per row."""

    def __init__(self, size: int | None = None) -> None:
        super().__init__()
        self.first, self.second, self.size = nn.Linear(3, 4), nn.Linear(3, 1), size

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        hidden = self.first(x)
        add_loss(hidden.square().mean(1)[: self.size])
        return hidden, self.second(x)


def test_losses_that_layers_add_are_means_over_rows_weighted_like_the_losses_of_the_outputs() -> None:
    network, y = Adds(), torch.tensor([0, 1, 2, 3, 0, 1, 3])
    x, z, w = torch.randn(ROWS, 3), torch.randn(ROWS), torch.rand(ROWS)
    seen = _run(TWO_HEADS, network, Batch(inputs=(x,), labels=(y, z), weight=w))
    hidden, value = network(x)
    weights = torch.stack([w * CLASSES.weight[y] * (y != 3), w], 1)
    entropy = nn.functional.cross_entropy(hidden, y, reduction="none")
    rows = torch.stack([entropy, (value[:, 0] - z).square()], 1)
    added = hidden.square().mean(1)
    means = (weights * rows).sum(0) / weights.sum(0)
    added_means = (weights * added[:, None]).sum(0) / weights.sum(0)
    factors = torch.tensor([2.0, 0.5])
    _assert_gradients_of((factors * means).sum() + (factors * added_means).sum() / factors.sum(), network)
    # The history shows only the losses of the outputs.
    torch.testing.assert_close(torch.stack([part.losses for part in seen]).sum(0), (weights * rows).sum(0))


def test_a_layers_loss_that_is_no_value_per_row_is_refused() -> None:
    labels = torch.zeros(12).long(), torch.zeros(12)
    batch = Batch(inputs=(torch.randn(12, 3),), labels=labels, weight=None)
    message = r"a loss of shape \(4,\), one value per row, got \(1,\); give add_loss"
    with pytest.raises(ValueError, match=message):
        _run(TWO_HEADS, Adds(size=1), batch)
