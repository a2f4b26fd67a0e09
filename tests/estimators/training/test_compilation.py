"""`compile`: the ranks train a compiled network, to the plain one's weights, compiled once."""

from __future__ import annotations

import os
import subprocess
import sys
import textwrap
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from small_training import config_of, train_gang, weights_of
from torch._dynamo.utils import counters

from ringspark.estimators.launch.local import train_here
from ringspark.estimators.training.callbacks import Callback, TrainingState
from ringspark.estimators.training.settings.config import TrainConfig, UserObjects
from ringspark.models import ModelSpec
from ringspark.models.recompute.activation_checkpoint import apply_activation_checkpoint, compile_segments
from ringspark.pipelines import ShardManifest

# torch says so of its own modules when it imports its compiler.
pytestmark = pytest.mark.filterwarnings("ignore:`torch.jit.script:DeprecationWarning")

MODEL = ModelSpec(
    "mlp",
    {"in_features": 4, "hidden": [16, 16, 16], "out_features": 1, "norm": "layer", "dropout": 0.1},
)


def shards(make_shards: Any, rows: int, **options: Any) -> ShardManifest:
    """Returns `rows` rows, of which the last step of 32 has one row if rows is 32 n + 1."""
    x = np.random.default_rng(3).standard_normal((rows, 4)).astype(np.float32)
    manifest: ShardManifest = make_shards({"x": x, "y": x[:, 0] * x[:, 1]}, **options)
    return manifest


def config(manifest: ShardManifest, run_uri: Path, **changes: Any) -> TrainConfig:
    return config_of(manifest, run_uri, model=MODEL.to_json(), **changes)


class CountGraphs(Callback):
    """Notes how many graphs torch has compiled by the end of each epoch."""

    def __init__(self) -> None:
        self.counts: list[int] = []

    def on_train_start(self, state: TrainingState) -> None:
        counters.clear()

    def on_epoch_end(self, state: TrainingState) -> None:
        self.counts.append(counters["stats"]["unique_graphs"])


@pytest.mark.slow
def test_batches_of_many_sizes_are_compiled_for_once(make_shards: Any, tmp_path: Path) -> None:
    # 96 rows to train, in steps of 31, 31, 31 and 3; 33 to hold out: 31 and 2.
    manifest = shards(make_shards, 129, validation=np.arange(129) >= 96)
    count = CountGraphs()
    train_here(
        config(manifest, tmp_path / "run", batch_size=31, gradient_accumulation=2, epochs=3, compile=True),
        UserObjects(callbacks=(count,)),
    )
    assert count.counts == [2, 2, 2]  # one for training, one for evaluation


@pytest.mark.slow
def test_a_single_row_is_not_compiled_for(make_shards: Any, tmp_path: Path) -> None:
    count = CountGraphs()
    run = config(shards(make_shards, 33), tmp_path / "run", compile=True)
    train_here(run, UserObjects(callbacks=(count,)))
    assert count.counts == [1, 1]


VARIANTS: dict[str, dict[str, Any]] = {
    "horovod": {"collective": "horovod", "gradient_accumulation": 2},
    "torch": {"collective": "torch", "max_grad_norm": 0.5},
    "bf16": {"collective": "torch", "precision": "bf16"},
    "checkpointing": {"collective": "horovod", "gradient_checkpointing": "sqrt"},
    "zero1": {"collective": "torch", "sharding": "optimizer"},
    "zero2": {"collective": "torch", "sharding": "gradients"},
}


@pytest.mark.slow
@pytest.mark.distributed
@pytest.mark.parametrize("name", VARIANTS)
def test_compiled_weights_are_the_plain_ones(name: str, make_shards: Any, tmp_path: Path) -> None:
    # The last step has one row, so one rank has none.
    manifest = shards(make_shards, 97)
    plain = config(manifest, tmp_path / "plain", num_workers=2, **VARIANTS[name])
    mine = replace(plain, run_uri=str(tmp_path / "compiled"), compile=True)
    # Loaded by the plain network's names.
    expected, found = (weights_of(train_gang(run), MODEL.build()) for run in (plain, mine))
    tolerance = 2e-2 if plain.precision == "bf16" else 1e-5
    torch.testing.assert_close(found, expected, rtol=tolerance, atol=tolerance)


@pytest.mark.slow
def test_a_rank_without_a_compiler_says_so_before_the_first_step(make_shards: Any, tmp_path: Path) -> None:
    run = config(shards(make_shards, 64), tmp_path / "run", compile=True)
    code = f"""
        from ringspark.estimators.launch.local import train_here
        from ringspark.estimators.training.settings.config import TrainConfig
        try:
            train_here(TrainConfig.from_json({run.to_json()!r}))
        except RuntimeError as error:
            print(error)
    """
    environment = os.environ | {"CXX": str(tmp_path / "no-compiler")}
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(code)],
        env=environment,
        capture_output=True,
        text=True,
        check=True,
    )
    assert done.stdout.startswith("compile needs a C++ compiler on every worker"), done.stderr
    assert not (tmp_path / "run" / "history.json").exists()


def test_only_innermost_recomputed_modules_are_compiled_by_themselves() -> None:
    plain = MODEL.build()
    assert not compile_segments(plain, None)
    net = apply_activation_checkpoint(MODEL.build(), ["trunk", "trunk.0"])
    assert compile_segments(net, None)
    stand_ins: list[Any] = [vars(module)["forward"] for module in (net.trunk, net.trunk[0])]  # type: ignore[index]
    assert [stand_in.compiled is not None for stand_in in stand_ins] == [False, True]
