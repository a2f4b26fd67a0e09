"""`activationOffload` and `activationCompression` in whole trainings."""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from parity import difference
from small_training import columns_of, config_of

from ringspark.estimators.launch.local import train_here
from ringspark.estimators.training.settings.config import UserObjects
from ringspark.estimators.training.worker import TrainResult
from ringspark.models import ModelSpec

SPEC = ModelSpec("mlp", {"in_features": 16, "hidden": [128, 128], "out_features": 1, "dropout": 0.2})
NETWORK = SPEC.build()


@pytest.fixture
def train(make_shards: Any, tmp_path: Path) -> Callable[..., TrainResult]:
    """Returns a function that trains four epochs."""
    manifest = make_shards(columns_of(600, 16))

    def train(**changes: Any) -> TrainResult:
        run = tmp_path / "-".join(map(str, changes.values()))
        config = config_of(manifest, run, model=SPEC, batch_size=100, epochs=4, **changes)
        return train_here(config, UserObjects())

    return train


@pytest.mark.parametrize("accumulation", [1, pytest.param(3, marks=pytest.mark.slow)])
@pytest.mark.parametrize(("offload", "compression"), [("disk", "none"), ("none", "bits"), ("disk", "bits")])
def test_exact_techniques_train_the_same_weights(
    train: Any, offload: str, compression: str, accumulation: int
) -> None:
    plain = train(gradient_accumulation=accumulation)
    settings = {"activation_offload": offload, "activation_compression": compression}
    packed = train(gradient_accumulation=accumulation, **settings)
    assert packed.history[-1].train_loss == plain.history[-1].train_loss
    assert difference(packed, plain, NETWORK) == 0


@pytest.mark.parametrize("compression", ["int8", "fp8"])
def test_eight_bits_reach_the_training_and_hardly_change_it(train: Any, compression: str) -> None:
    plain, packed = train(), train(activation_compression=compression)
    assert difference(packed, plain, NETWORK) > 0
    assert packed.history[-1].train_loss == pytest.approx(plain.history[-1].train_loss, rel=0.05)


def test_offload_reaches_the_training(train: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "missing"))
    with pytest.raises(OSError, match=r"activationOffload 'disk' could not write .* No such file"):
        train(activation_offload="disk")
