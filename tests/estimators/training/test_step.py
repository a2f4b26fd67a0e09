"""One micro-batch: gradients on the network, everything else returned."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import nn

from ringspark.estimators.collectives.local_collective import LocalCollective
from ringspark.estimators.parallel.base import PlainSync
from ringspark.estimators.training.feed import Batch
from ringspark.estimators.training.objective.criterion import Criterion
from ringspark.estimators.training.objective.heads import Head
from ringspark.estimators.training.precision import LossScaler
from ringspark.estimators.training.settings.config import TrainConfig
from ringspark.estimators.training.step import Recipe, forward_backward, global_weights

CPU = torch.device("cpu")
ROWS = 7


def _recipe() -> Recipe:
    config = TrainConfig(
        shards_uri="", run_uri="", input_columns=("x",), label_columns=("y",), reader="arrow"
    )
    criterion = Criterion([Head(label="y", loss="mse", weight=2.0)])
    return Recipe(config=config, criterion=criterion, scaler=LossScaler("fp32", CPU), device=CPU)


@pytest.mark.parametrize("keeps_outputs", [True, False])
def test_micro_batches_return_their_rows_and_add_up_to_the_weighted_mean(keeps_outputs: bool) -> None:
    torch.manual_seed(0)
    network = nn.Linear(3, 1)
    x, y, w = torch.randn(ROWS, 3), torch.randn(ROWS), torch.rand(ROWS)
    sync, recipe = PlainSync(network, torch.optim.SGD(network.parameters())), _recipe()
    batch = Batch(inputs=(x,), labels=(y,), weight=w)
    divisor = global_weights(recipe, batch, ROWS, LocalCollective())
    parts = batch.split(3)
    seen = [forward_backward(recipe, sync, part, divisor, keeps_outputs=keeps_outputs) for part in parts]

    rows = (network(x)[:, 0] - y).square() * w
    loss = 2.0 * rows.sum() / w.sum()
    expected = torch.autograd.grad(loss, list(network.parameters()))
    for parameter, gradient in zip(network.parameters(), expected, strict=True):
        torch.testing.assert_close(parameter.grad, gradient)
    torch.testing.assert_close(torch.cat([part.losses for part in seen]).sum(), rows.sum())
    torch.testing.assert_close(torch.cat([part.weights for part in seen]).sum(), w.sum())
    kept = [pair for part in seen for pair in part.pairs]
    assert [len(label) for _, label in kept] == ([3, 2, 2] if keeps_outputs else [])
    assert not any(output.requires_grad for output, _ in kept)


@pytest.mark.parametrize("own_rows", [1, 3, ROWS])
def test_out_of_step_rows_of_weight_1_count_as_rows_without_a_weight(own_rows: int) -> None:
    """Whatever share of the batch a rank has; so do twice the weights, as the mean divides by them."""
    recipe = _recipe()
    batch = Batch(inputs=(torch.zeros(own_rows, 3),), labels=(torch.zeros(own_rows),), weight=None)
    plain = global_weights(recipe, batch, ROWS, None)
    for weight in (1.0, 2.0):
        weighted = replace(batch, weight=torch.full((own_rows,), weight))
        assert global_weights(recipe, weighted, ROWS, None).tolist() == [plain * weight]  # type: ignore[union-attr, operator]
