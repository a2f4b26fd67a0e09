"""Numbers of few bits over a mesh: fp16, steps that are not finite, and packed activations."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from small_training import config_of, train_gang, train_in_turn, weights_of

from ringspark.estimators.training.settings.config import TrainConfig, UserObjects
from ringspark.estimators.training.worker import TrainResult
from ringspark.models import ModelSpec
from ringspark.pipelines import ShardManifest

pytestmark = pytest.mark.distributed
MakeShards = Callable[..., ShardManifest]
MLP = ModelSpec("mlp", {"in_features": 16, "hidden": [128, 128], "out_features": 1, "activation": "tanh"})
TEXT = {"vocab_size": 23, "max_seq_len": 12, "dim": 32, "depth": 2, "num_heads": 4, "out_features": 1}
EXPERTS = {"num_experts": 4, "router": "gshard", "every": 2}
TEXTS = {
    "sequence": ModelSpec("transformer_classifier", TEXT),
    "expert": ModelSpec("transformer_classifier", {**TEXT, "experts": EXPERTS}),
}
BAD_LABEL = 100.0


class InfiniteLoss:
    """Is infinite at the bad label."""

    def __call__(self, output: torch.Tensor, label: torch.Tensor) -> torch.Tensor:
        return torch.where(label == BAD_LABEL, math.inf, (output[:, 0] - label).square())


def _config(make_shards: MakeShards, folder: Path, axis: str, **changes: Any) -> TrainConfig:
    """Returns settings of two workers along `axis`, four epochs and 100 rows per step."""
    rng = np.random.default_rng(3)
    if axis in TEXTS:
        spec, x = TEXTS[axis], rng.integers(0, 23, (600, 12))
        y = np.cos(x[:, 0]) + x[:, 1] / 23
    else:
        spec, x = MLP, rng.normal(size=(600, 16)).astype(np.float32)
        y = x[:, 0] - x[:, 1] * x[:, 2]
    y = y.astype(np.float32)
    if changes.get("on_non_finite"):
        y[350] = BAD_LABEL  # in step 4, without a shuffle
    settings: dict[str, Any] = {
        "model": spec.to_json(),
        "losses": ("mse",),
        "batch_size": 100,
        "epochs": 4,
        # Key biases get only rounding errors as gradients, which Adam would turn into full steps.
        "optimizer": "momentum",
        "shuffle": False,
        "collective": "torch",
        "num_workers": 2,
        "parallelism": {axis: 2},
    }
    return config_of(make_shards({"x": x, "y": y}, num_files=1), folder, **settings | changes)


def _one(config: TrainConfig) -> TrainConfig:
    return replace(config, run_uri=f"{config.run_uri}-one", num_workers=1, parallelism={})


def _difference(first: TrainResult, second: TrainResult, spec: ModelSpec = MLP) -> float:
    return float((weights_of(first, spec.build()) - weights_of(second, spec.build())).abs().max())


@pytest.mark.slow
@pytest.mark.parametrize("mesh", [{"tensor": 2}, {"tensor": 2, "sequence_parallel": True}], ids=str)
def test_fp16_over_tensor_learns_like_one_worker(
    make_shards: MakeShards, tmp_path: Path, mesh: dict[str, Any]
) -> None:
    axis = "sequence" if len(mesh) > 1 else "tensor"  # texts or numbers
    config = _config(make_shards, tmp_path / "run", axis, precision="fp16", parallelism=mesh)
    many, one = train_gang(config), train_gang(_one(config))
    assert many.history[-1].train_loss < 0.8 * many.history[0].train_loss
    # The loss scale begins near the overflow, so rounding decides how many of the first steps are skipped.
    assert many.history[-1].train_loss == pytest.approx(one.history[-1].train_loss, rel=0.1)


@pytest.mark.slow
@pytest.mark.parametrize("precision", ["fp32", "fp16"])
@pytest.mark.parametrize("axis", ["tensor", "sequence", "expert", "pipeline"])
def test_a_mesh_skips_the_steps_that_one_worker_skips(
    make_shards: MakeShards, tmp_path: Path, axis: str, precision: str
) -> None:
    changes: dict[str, Any] = {"on_non_finite": "skip", "losses": ("custom",), "precision": precision}
    if axis == "pipeline":
        changes["gradient_accumulation"] = 2
    config = _config(make_shards, tmp_path / "run", axis, **changes)
    own = UserObjects(losses=(InfiniteLoss(),))
    many, one = train_gang(config, own), train_gang(_one(config), own)
    assert [(found.epoch, found.step) for found in many.non_finite] == [(n, 4) for n in (1, 2, 3, 4)]
    assert [(found.epoch, found.step) for found in one.non_finite] == [(n, 4) for n in (1, 2, 3, 4)]
    assert many.history[-1].train_loss < many.history[0].train_loss
    if precision == "fp32":
        assert _difference(many, one, TEXTS.get(axis, MLP)) < 1e-5
    assert many.history[-1].train_loss == pytest.approx(one.history[-1].train_loss, rel=0.1)


@pytest.mark.slow
def test_a_mesh_rolls_back_as_one_worker_does(make_shards: MakeShards, tmp_path: Path) -> None:
    changes = {"on_non_finite": "rollback", "losses": ("custom",), "checkpoint_every_steps": 2}
    config = _config(make_shards, tmp_path / "run", "tensor", **changes)
    own = UserObjects(losses=(InfiniteLoss(),))
    for each in (config, _one(config)):
        with pytest.raises(Exception, match=r"epoch 1, step 4: .* 5 rollbacks to step 2, .* did not help"):
            train_gang(each, own)


PACKED: dict[str, dict[str, str]] = {
    "plain": {},
    "bits": {"activation_compression": "bits"},
    "disk": {"activation_offload": "disk"},
    "int8": {"activation_compression": "int8"},
    "fp8": {"activation_compression": "fp8", "activation_offload": "disk"},
}


@pytest.mark.slow
@pytest.mark.parametrize("axis", ["tensor", "sequence", "expert"])
def test_packed_activations_train_over_a_mesh(make_shards: MakeShards, tmp_path: Path, axis: str) -> None:
    config = _config(make_shards, tmp_path / "run", axis)
    results = train_in_turn(
        {name: replace(config, run_uri=str(tmp_path / name), **own) for name, own in PACKED.items()}
    )
    spec, plain = TEXTS.get(axis, MLP), results["plain"]
    assert _difference(plain, train_gang(_one(config)), spec) < 1e-5
    assert plain.history[-1].train_loss < plain.history[0].train_loss
    for exact in ("bits", "disk"):
        assert _difference(plain, results[exact], spec) == 0
    for lossy in ("int8", "fp8"):
        assert 0 < _difference(plain, results[lossy], spec) < 0.05
        for mine, theirs in zip(results[lossy].history, plain.history, strict=True):
            assert mine.train_loss == pytest.approx(theirs.train_loss, rel=0.05)
