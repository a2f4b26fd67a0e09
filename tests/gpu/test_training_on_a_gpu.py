"""A training on a GPU, without Spark: the weights of the CPU's, exact resumption, the run's notes."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from bare_predictor import bare_predictor
from parity import assert_equal_histories, equal_to_undisturbed
from small_training import config_of, weights_of

pytest.importorskip("ringspark.extras")

from ringspark.estimators.launch.local import train_here
from ringspark.estimators.training.checkpoint.weights import read_info
from ringspark.estimators.training.history import read_history
from ringspark.extras.planning.memory.plan import plan_memory
from ringspark.models import ModelSpec
from ringspark.pipelines import ShardManifest

# torch warns about its own modules when it imports its compiler.
pytestmark = pytest.mark.filterwarnings("ignore:`torch.jit.script:DeprecationWarning")

ROWS = 512
MLP = ModelSpec("mlp", {"in_features": 6, "hidden": [32, 32], "out_features": 1, "dropout": 0.1})
SMOOTH = ModelSpec("mlp", {"in_features": 6, "hidden": [32, 32], "out_features": 1})

SETTINGS: dict[str, dict[str, Any]] = {
    "plain": {},
    "accumulation": {"gradient_accumulation": 4},
    "clipping": {"max_grad_norm": 0.1},
    "average of weights": {"ema_decay": 0.9},
    "recomputed blocks": {"gradient_checkpointing": "all"},
    "saved tensors on disk": {"activation_offload": "disk"},
    "saved tensors in bits": {"activation_compression": "bits"},
    "adamw of 8 bits": {"optimizer": "adamw8bit"},
    "kept rows": {"cache": "memory"},
    "schedule": {"lr_schedule": "cosine", "warmup_steps": 4},
    "two metrics": {"metrics": ("mae", "r2")},
    "skipped steps": {"on_non_finite": "skip"},
    "rows of unequal weight": {"weight_column": "w"},
}
PRECISIONS = {"fp32": 1e-5, "bf16": 0.03, "fp16": 0.01}


@pytest.fixture
def manifest(make_shards: Callable[..., ShardManifest]) -> ShardManifest:
    generator = np.random.default_rng(0)
    x = generator.normal(size=(ROWS, 6)).astype(np.float32)
    y = np.sin(x[:, 0]) + x[:, 1] * x[:, 2]
    is_held_out = np.arange(ROWS) % 4 == 0
    weights = generator.uniform(0.5, 2.0, ROWS).astype(np.float32)
    return make_shards({"x": x, "y": y.astype(np.float32), "w": weights}, validation=is_held_out)


def trained(
    manifest: ShardManifest, run: Path, device: str, spec: ModelSpec = SMOOTH, **changes: Any
) -> tuple[torch.Tensor, list[float]]:
    config = config_of(manifest, run, model=spec.to_json(), **changes)
    result = train_here(config, device=device)
    losses = [record.train_loss for record in result.history]
    assert all(record.validation_loss is not None for record in result.history)
    return weights_of(result, spec.build()), losses


@pytest.mark.parametrize("name", SETTINGS)
def test_a_training_ends_with_the_weights_of_the_cpu(name, manifest, tmp_path, device):
    weights, losses = trained(manifest, tmp_path / "gpu", device, **SETTINGS[name])
    wanted, wanted_losses = trained(manifest, tmp_path / "cpu", "cpu", **SETTINGS[name])
    np.testing.assert_allclose(losses, wanted_losses, rtol=1e-3 if "8 bits" in name else 1e-5)
    # Two epochs move a weight by 0.2 at most.
    torch.testing.assert_close(weights, wanted, rtol=0, atol=1e-2 if "8 bits" in name else 1e-4)


def test_a_pack_for_a_table_trains_as_on_the_cpu(make_shards, tmp_path, device):
    generator = np.random.default_rng(0)
    numbers = generator.normal(size=(ROWS, 3)).astype(np.float32)
    ids = generator.integers(0, 5, size=(ROWS, 2))
    columns = {"x": numbers, "ids": ids, "y": (numbers[:, 0] > 0) + ids[:, 0] % 2}
    manifest = make_shards(columns, validation=np.arange(ROWS) % 4 == 0)
    table = {"edges": [[-1.0, 0.0, 1.0]] * 3, "cardinalities": [5, 5], "out_features": 3, "unknown": 0.0}
    pack = {"dropouts": [0.0] * 3, "rates": [1.0, 0.5, 0.3], "width": 16, "averages": "probabilities"}
    given: dict[str, Any] = {"input_columns": ("x", "ids"), "task": "classification", "keep": "best"}
    given |= {"losses": ("cross_entropy_per_member",), "metrics": ("accuracy", "temperature")}
    given |= {"optimizer": "adamw", "ema_decay": 0.9}
    spec = ModelSpec("tabpack", table | pack)
    weights, losses = trained(manifest, tmp_path / "gpu", device, spec, **given)
    wanted, wanted_losses = trained(manifest, tmp_path / "cpu", "cpu", spec, **given)
    np.testing.assert_allclose(losses, wanted_losses, rtol=1e-4)
    torch.testing.assert_close(weights, wanted, rtol=0, atol=1e-3)


@pytest.mark.parametrize("precision", PRECISIONS)
def test_a_memory_plan_holds_for_the_device(precision: str, device: str) -> None:
    """Only the bytes that the device's kernels save differ from the plan of a CPU."""
    spec = ModelSpec("mlp", {"in_features": 64, "hidden": [256] * 4, "out_features": 10})
    batch = torch.randn(512, 64), torch.zeros(512, dtype=torch.long)
    plans = {
        use_gpu: plan_memory(spec, batch, precision=precision, collective="local", useGpu=use_gpu)
        for use_gpu in (False, device != "cpu")
    }
    assert plans[device != "cpu"].peak == pytest.approx(plans[False].peak, rel=0.3)


@pytest.mark.parametrize("precision", PRECISIONS)
@pytest.mark.parametrize("compile", [False, True])
def test_a_precision_stays_near_fp32(precision, compile, manifest, tmp_path, device):
    if device == "cpu" and precision == "fp16":
        pytest.skip("fp16 needs a GPU")
    given = {"precision": precision, "compile": compile, "use_gpu": device != "cpu"}
    _, losses = trained(manifest, tmp_path / "gpu", device, **given)
    _, wanted = trained(manifest, tmp_path / "cpu", "cpu")
    np.testing.assert_allclose(losses, wanted, rtol=PRECISIONS[precision])


def test_host_memory_takes_saved_tensors_and_changes_no_bit(manifest, tmp_path, device):
    if device == "cpu":
        pytest.skip("everything is on the host")
    plain, _ = trained(manifest, tmp_path / "plain", device, MLP, use_gpu=True)
    moved, _ = trained(manifest, tmp_path / "moved", device, MLP, use_gpu=True, activation_offload="host")
    assert torch.equal(plain, moved)


@pytest.mark.parametrize("precision", PRECISIONS)
@pytest.mark.parametrize("optimizer", ["adamw", "adam8bit", "momentum"])
def test_a_resumed_training_has_the_bits_of_another(precision, optimizer, manifest, tmp_path, device):
    if device == "cpu" and precision == "fp16":
        pytest.skip("fp16 needs a GPU")
    given = {"precision": precision, "optimizer": optimizer, "epochs": 3}
    given |= {"checkpoint_every_steps": 5, "use_gpu": device != "cpu"}
    config = config_of(manifest, tmp_path / "run", model=MLP, **given)
    pair = equal_to_undisturbed(config, step=13, train=lambda *given: train_here(*given, device))
    assert pair[1].resumed_steps == (10,)
    assert_equal_histories(*pair, bound=0.0)


def test_a_run_notes_the_device_its_memory_and_its_energy(manifest, tmp_path, device):
    if device == "cpu":
        pytest.skip("notes of a GPU")
    trained(manifest, tmp_path / "run", device, use_gpu=True, timeline_every_steps=2)
    environment = json.loads((tmp_path / "run" / "environment.json").read_text())
    (note,) = environment["starts"][-1]["ranks"]
    assert note["device"] == torch.cuda.get_device_name()
    assert 0 < note["peak_device_memory"] < 1 << 30
    for record in read_history(str(tmp_path / "run")):
        cost = record.cost
        assert cost is not None
        assert cost.energy_joules is None or 0 <= cost.energy_joules < 1e6
        assert cost.flops is not None
        assert cost.flops > ROWS * 6 * 32


@pytest.mark.extras
def test_a_timeline_has_the_devices_times(manifest: ShardManifest, tmp_path: Path, device: str) -> None:
    if device == "cpu":
        pytest.skip("times of a GPU")
    from ringspark.extras.timeline.span_file import read_spans

    trained(manifest, tmp_path / "run", device, use_gpu=True, timeline_every_steps=1)
    (rank,) = read_spans(str(tmp_path / "run"))
    assert any(step.device_spans for step in rank.steps)
    for step in rank.steps:
        if not step.device_spans:
            continue
        host = {kind: (begin, end) for kind, begin, end in step.spans}
        of_device = {kind: (begin, end) for kind, begin, end in step.device_spans}
        assert {"forward", "backward", "step"} <= of_device.keys()
        for kind, (begin, end) in of_device.items():
            assert begin <= end
            # A device begins a span after the host has given it the work; clocks differ by microseconds.
            assert begin >= host[kind][0] - 200_000
        assert of_device["forward"][1] <= of_device["backward"][0] + 50_000


@pytest.mark.parametrize("offload", ["none", "disk"])
@pytest.mark.parametrize("batch_size", [7, 4096])
def test_predictions_are_those_of_the_cpu(offload, batch_size, manifest, tmp_path, device):
    result = train_here(config_of(manifest, tmp_path / "run", model=SMOOTH.to_json()), device=device)
    rows = np.random.default_rng(1).normal(size=(1000, 6)).astype(np.float32)
    found = {}
    for where in (device, "cpu"):
        uri, use = result.checkpoint_uri, {"batch_size": batch_size, "use_gpu": where != "cpu"}
        of_run = {"weights_uri": uri, "weights_id": read_info(uri).checkpoint_id}
        predictor = bare_predictor(SMOOTH, **of_run, **use, offload=offload)
        found[where] = predictor.predict(predictor.load(where), [rows], where)
    np.testing.assert_allclose(found[device], found["cpu"], rtol=1e-4, atol=1e-5)
