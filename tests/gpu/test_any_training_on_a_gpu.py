"""Own training steps, second derivatives and private gradients on a GPU: the weights of the CPU."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import own_training_steps as steps
import pytest
import torch
from small_training import config_of, weights_of
from torch import nn

from ringspark.estimators import Privacy
from ringspark.estimators.launch.local import train_here
from ringspark.estimators.training.check.driver import check_training
from ringspark.estimators.training.objective.losses import NETWORK_LOSS
from ringspark.estimators.training.settings.config import UserObjects
from ringspark.pipelines import ShardManifest

ROWS = 192
PRECISIONS = {"fp32": 1e-4, "bf16": 0.02, "fp16": 0.02}


@pytest.fixture
def manifest(make_shards: Callable[..., ShardManifest]) -> ShardManifest:
    rng = np.random.default_rng(0)
    x = rng.normal(size=(ROWS, 4)).astype("f4")
    point, kind = rng.normal(size=(ROWS, 2)).astype("f4"), rng.integers(0, 3, ROWS)
    return make_shards({"x": x, "y": x.sum(1), "point": point, "kind": kind})


def network() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 16), nn.Tanh(), nn.Linear(16, 16), nn.Tanh(), nn.Linear(16, 1))


def penalty(module: nn.Module, inputs: Any, outputs: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    """Returns the squared error and a gradient penalty, (rows,)."""
    (slope,) = torch.autograd.grad(outputs.sum(), inputs, create_graph=True)
    return (outputs[:, 0] - labels).square() + (slope.norm(dim=1) - 1).square()


def compare(manifest: Any, folder: Path, device: str, make: Any, **changes: Any) -> float:
    """Returns the largest difference of a weight between a training on the device and one on the CPU."""
    found = []
    for name, on in (("gpu", device), ("cpu", "cpu")):
        precision = {} if on == device else {"precision": "fp32"}
        config = config_of(manifest, folder / name, **changes | precision | {"use_gpu": on != "cpu"})
        objects = make()
        checked = check_training(config, objects, manifest).config
        result = train_here(checked, objects, device=on)
        found.append(weights_of(result, make().module))
    return float((found[0] - found[1]).abs().max())


@pytest.mark.parametrize("precision", PRECISIONS)
@pytest.mark.parametrize("name", ["gan", "contrastive"])
def test_an_own_training_step_has_the_weights_of_the_cpu(name, precision, manifest, tmp_path, device):
    if device == "cpu" and precision == "fp16":
        pytest.skip("fp16 needs a GPU")

    def make() -> UserObjects:
        torch.manual_seed(0)
        if name == "gan":
            return UserObjects(
                module=steps.Gan(), training_step=steps.gan_step, optimizer=steps.gan_optimizers
            )
        return UserObjects(module=steps.Encoder(), training_step=steps.contrastive_step)

    changes = {"task": "any", "losses": ("auto",), "training_step": "own", "precision": precision}
    label = "point" if name == "gan" else "kind"
    found = compare(manifest, tmp_path, device, make, **changes, label_columns=(label,))
    assert found < PRECISIONS[precision]


# In fp16 the loss scaler skips a step, which no tolerance covers; tests/extras/network_losses compares it.
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize("checkpointing", ["none", "all"])
def test_second_derivatives_are_those_of_the_cpu(checkpointing, precision, manifest, tmp_path, device):
    changes = {"losses": (NETWORK_LOSS,), "gradient_checkpointing": checkpointing, "precision": precision}
    objects = partial(UserObjects, losses=(penalty,))
    found = compare(manifest, tmp_path, device, lambda: objects(module=network()), **changes)
    assert found < PRECISIONS[precision]


@pytest.mark.skipif(find_spec("opacus") is None, reason="needs opacus")
def test_clipped_gradients_of_rows_are_those_of_the_cpu(manifest, tmp_path, device):
    """With batchSize = rows each step has all rows, and the noise is too small to see."""
    quiet = Privacy(noise_multiplier=1e-7, delta=1e-5, max_grad_norm=0.5)
    changes = {"privacy": quiet, "batch_size": ROWS, "optimizer": "sgd", "epochs": 5}
    found = compare(manifest, tmp_path, device, lambda: UserObjects(module=network()), **changes)
    assert found < PRECISIONS["fp32"]


@pytest.mark.skipif(find_spec("opacus") is None, reason="needs opacus")
def test_noise_on_a_gpu_has_the_promised_variance(make_shards, tmp_path, device):
    from private_shards import Moves, columns, objects, private_config, still

    path = tmp_path / "moves.pt"
    noisy = Privacy(noise_multiplier=1.3, delta=1e-5, max_grad_norm=0.5)
    config = private_config(make_shards(columns()), tmp_path / "run", privacy=noisy, learning_rate=1.0)
    config = replace(config, use_gpu=device != "cpu")
    train_here(config, objects(module=still(), callbacks=(Moves(str(path)),)), device=device)
    noise = torch.load(path, map_location="cpu") * config.batch_size
    # Five standard deviations of the variance of n normal numbers.
    assert float(noise.var()) == pytest.approx((1.3 * 0.5) ** 2, rel=5 * (2 / noise.numel()) ** 0.5)
