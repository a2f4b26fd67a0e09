"""Training steps of a user's own: N ranks train the weights of one rank, also in steps without rows."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import own_training_steps as steps
import pytest
import torch
from small_training import config_of, train_in_turn, weights_of

from ringspark.estimators.training.settings.config import TrainConfig, UserObjects
from ringspark.estimators.training.worker import TrainResult
from ringspark.pipelines import ShardManifest
from torch import nn

# The last step of an epoch has one row, so other ranks have none.
ROWS = 65


def columns(rows: int = ROWS) -> dict[str, np.ndarray]:
    rng = np.random.default_rng(3)
    x = rng.normal(size=(rows, 4)).astype(np.float32)
    return {
        "x": x,
        "y": x.sum(1),
        "point": rng.normal(size=(rows, 2)).astype(np.float32),
        "kind": rng.integers(0, 3, rows),
        "w": rng.uniform(0.5, 2, rows).astype(np.float32),
    }


def own(manifest: ShardManifest, run: Path, **changes: Any) -> TrainConfig:
    return config_of(manifest, run, **{"task": "any", "training_step": "own", "losses": ("auto",), **changes})


# Case -> config and objects.
def cases(manifest: ShardManifest, folder: Path) -> dict[str, tuple[dict[str, Any], UserObjects]]:
    torch.manual_seed(0)
    gan = UserObjects(module=steps.Gan(), training_step=steps.gan_step, optimizer=steps.gan_optimizers)
    noise = {"input_columns": ("x",), "label_columns": ("point",)}
    encoder = steps.Encoder()
    kinds = {"label_columns": ("kind",)}
    return {
        "gan": (noise, gan),
        "weighted gan": ({**noise, "weight_column": "w", "max_grad_norm": 0.5}, gan),
        "gan in file order": ({**noise, "shuffle": False}, gan),
        "contrastive": (kinds, UserObjects(module=encoder, training_step=steps.contrastive_step)),
        "triplet": (kinds, UserObjects(module=encoder, training_step=steps.triplet_step)),
    }


def _train(manifest: ShardManifest, folder: Path, ranks: int, collective: str, name: str) -> TrainResult:
    changes, objects = cases(manifest, folder)[name]
    changes |= {"num_workers": ranks, "collective": collective if ranks > 1 else "local"}
    config = own(manifest, folder / f"{name} {ranks} {collective}", **changes)
    return train_in_turn({name: config}, objects)[name]


def _compare(first: TrainResult, second: TrainResult, module: nn.Module, atol: float = 1e-5) -> None:
    a, b = weights_of(first, module), weights_of(second, module)
    assert (a - b).abs().max() < atol
    for before, after in zip(first.history, second.history, strict=True):
        assert before.train_loss == pytest.approx(after.train_loss, rel=1e-4)
        assert before.metrics == pytest.approx(after.metrics, rel=1e-3)


if __name__ == "__main__":
    import tempfile
    import sys
    from written_shards import written

    folder = Path(tempfile.mkdtemp())
    manifest = written(folder / "shards", columns(), row_group_rows=16, validation=np.arange(ROWS) % 5 == 0)
    for name in cases(manifest, folder):
        results = {
            key: _train(manifest, folder, *key, name) for key in [(1, "torch"), (2, "torch"), (3, "torch"), (2, "horovod")]
        }
        first = results.pop((1, "torch"))
        module = cases(manifest, folder)[name][1].module
        for key, result in results.items():
            difference = (weights_of(first, module) - weights_of(result, module)).abs().max().item()
            print(name, key, f"{difference:.1e}", flush=True)
        print(first.history[-1].row())
        print(results[3,"torch"].history[-1].row())
