"""The gradient noise scale of a quadratic with known noise, measured in whole trainings."""

from typing import Any

import numpy as np
import pytest
import torch
from small_training import Runs, train_ranks
from torch import nn

from ringspark.estimators.training.history import GradientNoise
from ringspark.estimators.training.settings.config import UserObjects

pytestmark = pytest.mark.extras

ROWS, DIM = 8192, 64
# A rate so low that the weights and the noise do not change.
SETTINGS = {"task": "any", "optimizer": "sgd", "learning_rate": 1e-12, "noise_scale": True}


class Distance(nn.Module):
    """Computes weights - row; half its square has the gradient weights - row."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.weights = nn.Parameter(torch.zeros(width))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.weights - x


def half_square(output: torch.Tensor, label: torch.Tensor) -> torch.Tensor:
    return 0.5 * output.square().sum(1)


OBJECTS = UserObjects(module=Distance(DIM), losses=(half_square,))


def make_columns() -> dict[str, Any]:
    rng = np.random.default_rng(0)
    x = (rng.normal(size=(ROWS, DIM)) * rng.uniform(0.5, 2, DIM) + rng.normal(size=DIM) * 0.2).astype("f4")
    return {"x": x, "y": np.zeros(ROWS, "f4"), "w": rng.integers(1, 4, ROWS).astype(float)}


def expected(columns: dict[str, Any], weighted: bool = False) -> GradientNoise:
    gradients = -columns["x"].astype(float)
    if weighted:
        gradients *= (columns["w"] / columns["w"].mean())[:, None]
    variance = float(gradients.var(0, ddof=1).sum())
    return GradientNoise(variance=variance, square=float(np.square(gradients.mean(0)).sum()))


def check(noise: GradientNoise | None, answer: GradientNoise) -> None:
    assert noise is not None
    assert noise.variance == pytest.approx(answer.variance, rel=0.05)
    assert noise.scale == pytest.approx(answer.scale, rel=0.1)


@pytest.mark.distributed
@pytest.mark.parametrize(
    ("workers", "changes"),
    [
        (2, {"batch_size": 64, "batch_size_schedule": ((2, 96),)}),
        # Of 62 rows, two ranks get 21 and one gets 20.
        pytest.param(
            3, {"batch_size": 62, "weight_column": "w", "collective": "horovod"}, marks=pytest.mark.slow
        ),
    ],
)
def test_a_gang_finds_the_scale_of_a_quadratic(runs: Runs, workers: int, changes: dict[str, Any]) -> None:
    columns, settings = make_columns(), {"collective": "torch", "epochs": 4} | changes
    results = train_ranks(runs.config(columns, num_workers=workers, **settings), OBJECTS)
    assert all(record.noise is not None for record in results[0].history)
    assert results[0].history[-1].noise == results[1].history[-1].noise
    check(results[0].history[-1].noise, expected(columns, "weight_column" in changes))
    row = results[0].history[-1].row()
    assert row["noise_scale"] == row["gradient_variance"] / row["gradient_square"]


@pytest.mark.parametrize("precision", ["fp32", "fp16"])
def test_one_worker_finds_it_from_its_micro_batches(runs: Runs, precision: str) -> None:
    """The gradients of fp16 come from a scaled loss."""
    columns, changes = make_columns(), {"gradient_accumulation": 4, "precision": precision, "batch_size": 64}
    check(runs.here(columns, OBJECTS, **changes).history[-1].noise, expected(columns))
