"""`activationOffload` and `activationCompression` in whole trainings."""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from ringspark.estimators.launch.local import train_here
from ringspark.estimators.training.checkpoint.weights import load_checkpoint
from ringspark.estimators.training.settings.config import TrainConfig, UserObjects
from ringspark.models import ModelSpec
from ringspark.pipelines import ShardManifest

SPEC = ModelSpec("mlp", {"in_features": 16, "hidden": [128, 128], "out_features": 2, "dropout": 0.2})


@pytest.fixture
def train(
    make_shards: Callable[..., ShardManifest], tmp_path: Path
) -> Callable[..., tuple[list[torch.Tensor], float]]:
    """Returns a function that trains four epochs; it returns the weights and the last training loss."""
    rng = np.random.default_rng(3)
    x = rng.normal(size=(600, 16)).astype(np.float32)
    manifest = make_shards({"x": x, "label": (x[:, 0] > x[:, 1]).astype(np.int64)})

    def train(**settings: Any) -> tuple[list[torch.Tensor], float]:
        config = TrainConfig(
            shards_uri=manifest.uri,
            run_uri=str(tmp_path / "-".join(map(str, settings.values()))),
            task="classification",
            model=SPEC.to_json(),
            input_columns=("x",),
            label_columns=("label",),
            batch_size=100,
            learning_rate=0.01,
            epochs=4,
            reader="arrow",
            collective="local",
            **settings,
        )
        result = train_here(config, UserObjects())
        module = SPEC.build()
        load_checkpoint(result.checkpoint_uri, module)
        return [p.detach() for p in module.parameters()], result.history[-1].train_loss

    return train


@pytest.mark.parametrize("accumulation", [1, pytest.param(3, marks=pytest.mark.slow)])
@pytest.mark.parametrize(("offload", "compression"), [("disk", "none"), ("none", "bits"), ("disk", "bits")])
def test_exact_techniques_train_the_same_weights(
    train: Callable, offload: str, compression: str, accumulation: int
) -> None:
    plain, loss = train(gradient_accumulation=accumulation)
    packed, packed_loss = train(
        activation_offload=offload, activation_compression=compression, gradient_accumulation=accumulation
    )
    assert packed_loss == loss
    assert all(torch.equal(a, b) for a, b in zip(plain, packed, strict=True))


@pytest.mark.parametrize("compression", ["int8", "fp8"])
def test_eight_bits_reach_the_training_and_hardly_change_it(train: Callable, compression: str) -> None:
    plain, loss = train()
    packed, packed_loss = train(activation_compression=compression)
    assert not all(torch.equal(a, b) for a, b in zip(plain, packed, strict=True))
    assert packed_loss == pytest.approx(loss, rel=0.05)


def test_offload_reaches_the_training(
    train: Callable, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "missing"))
    with pytest.raises(OSError, match=r"activationOffload 'disk' could not write .* No such file"):
        train(activation_offload="disk")
