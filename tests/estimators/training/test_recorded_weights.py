"""Weights after 50 steps on 2 ranks equal the recorded ones: bitwise on that processor, else within 1e-5.

RINGSPARK_RECORD=1 writes a new record instead of comparing.
"""

import json
import os
import platform
import re
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import small_training
import torch
from safetensors.torch import load_file, save_file
from written_shards import written

from ringspark.estimators.options.sync import Zero
from ringspark.models import ModelSpec

RECORD = Path(__file__).resolve().parents[2] / "recorded" / "weights.safetensors"
PROCESSOR = RECORD.with_name("weights.json")
MODEL = ModelSpec("mlp", {"in_features": 4, "hidden": [16, 16, 16], "out_features": 1, "dropout": 0.1})
VARIANTS: dict[str, dict[str, Any]] = {
    "plain": {},
    "checkpointing": {"gradient_checkpointing": "sqrt", "gradient_accumulation": 2},
    "bf16": {"precision": "bf16"},
    "clipped": {"max_grad_norm": 0.1, "lr_schedule": "cosine", "warmup_steps": 5, "optimizer": "adam"},
    "zero1": {"sync": Zero(stage=1)},
    "zero2": {"sync": Zero(stage=2)},
    "zero3": {"sync": Zero(stage=3)},
}
CASES = [
    f"{collective}-{variant}"
    for collective in ("horovod", "torch")
    for variant in VARIANTS
    if (collective, variant) != ("horovod", "zero3")  # refused: it needs torch.distributed
]


def processor() -> dict[str, str]:
    """Returns everything that decides the order of additions."""
    # CPUs of one capability may use different kernels, because torch's libraries check the model.
    told = Path("/proc/cpuinfo").read_text() if Path("/proc/cpuinfo").exists() else platform.processor()
    kinds = re.findall(r"^(?:cpu family|model|stepping)\s*:\s*(\d+)$", told, re.MULTILINE)[:3]
    return {
        "torch": torch.__version__,
        "capability": torch.backends.cpu.get_cpu_capability(),
        "model": " ".join(kinds),
    }


def table() -> dict[str, np.ndarray]:
    """Returns 800 rows: 25 steps of 32 per epoch."""
    generator = np.random.Generator(np.random.PCG64(7))
    x = generator.standard_normal((800, 4)).astype(np.float32)
    return {
        "x": x,
        "y": (np.sin(x[:, 0]) + x[:, 1] * x[:, 2]).astype(np.float32),
        "w": generator.uniform(0.5, 1.5, 800).astype(np.float32),
    }


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], dict[str, torch.Tensor]]:
    """Returns all parameters of each variant after 50 steps on 2 ranks, as 1-D tensors."""
    folder = tmp_path_factory.mktemp("recorded")
    manifest = written(folder / "shards", table(), num_files=1)

    @cache
    def train(collective: str) -> dict[str, torch.Tensor]:
        changes = {"collective": collective, "num_workers": 2, "model": MODEL.to_json(), "weight_column": "w"}
        configs = {
            name: small_training.config_of(manifest, folder / name, **changes, **VARIANTS[name.split("-")[1]])
            for name in CASES
            if name.startswith(collective)
        }
        results = small_training.train_in_turn(configs)
        assert {result.steps for result in results.values()} == {50}
        return {name: small_training.weights_of(result, MODEL.build()) for name, result in results.items()}

    return train


@pytest.mark.distributed
@pytest.mark.parametrize("name", CASES)
def test_weights_are_as_recorded(name: str, trained: Callable[[str], dict[str, torch.Tensor]]) -> None:
    weights = trained(name.split("-")[0])[name]
    if os.environ.get("RINGSPARK_RECORD"):
        known = load_file(RECORD) if RECORD.exists() else {}
        save_file(known | {name: weights}, RECORD)
        PROCESSOR.write_text(json.dumps(processor(), indent=1))
        return
    expected, recorded = load_file(RECORD)[name], json.loads(PROCESSOR.read_text())
    if recorded["torch"].split("+")[0] != torch.__version__.split("+")[0]:
        pytest.skip(f"torch {torch.__version__} draws other initial weights than {recorded['torch']}")
    if recorded == processor():
        assert torch.equal(weights, expected), f"differs by {(weights - expected).abs().max().item():.1e}"
    else:
        torch.testing.assert_close(weights, expected, rtol=1e-5, atol=1e-5)
