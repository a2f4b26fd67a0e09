"""Trains a small regression on shards with spawned ranks, and reads its weights."""

import math
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from itertools import count
from pathlib import Path
from typing import Any

import numpy as np
import torch
from ranks import run_ranks
from safetensors.torch import load_file
from torch import nn

from ringspark.estimators import user_code
from ringspark.estimators.collectives import Collective
from ringspark.estimators.collectives.in_process import run_in_turns
from ringspark.estimators.launch.local import run_spawned, train_here
from ringspark.estimators.launch.train_task import TrainTask
from ringspark.estimators.options.mesh import AXES, Mesh
from ringspark.estimators.training.check.driver import check_training
from ringspark.estimators.training.checkpoint.weights import WEIGHTS, map_checkpoint
from ringspark.estimators.training.history import EpochRecord
from ringspark.estimators.training.settings.config import TrainConfig, UserObjects
from ringspark.estimators.training.worker import TrainResult, train_worker
from ringspark.models import ModelSpec
from ringspark.pipelines import ShardManifest


def columns_of(rows: int, width: int = 4) -> dict[str, np.ndarray]:
    """Returns float32 columns: `x` (rows, width), normally distributed, and `y` (rows,), its row sums."""
    x = np.random.default_rng(0).normal(size=(rows, width)).astype(np.float32)
    return {"x": x, "y": x.sum(1)}


def config_of(manifest: ShardManifest, run_uri: Path, **changes: Any) -> TrainConfig:
    """Returns settings of a regression: two epochs, 32 rows per step, input `x`, label `y`.

    `changes` override or add settings; their `model` may be a `ModelSpec`.
    """
    if isinstance(spec := changes.get("model"), ModelSpec):
        changes["model"] = spec.to_json()
    config = bare_config(
        shards_uri=manifest.uri,
        run_uri=str(run_uri),
        task="regression",
        losses=("mse",),
        batch_size=32,
        learning_rate=0.01,
        epochs=2,
        reader="arrow",
    )
    return replace(config, **changes)


def bare_config(**changes: Any) -> TrainConfig:
    """Returns settings without shards: input `x`, label `y`. `model` may be a `ModelSpec`."""
    if isinstance(spec := changes.get("model"), ModelSpec):
        changes["model"] = spec.to_json()
    given = {"shards_uri": "", "run_uri": "", "input_columns": ("x",), "label_columns": ("y",)}
    return TrainConfig(**given | {"reader": "arrow"} | changes)


def epoch_record(epoch: int = 1, **changes: Any) -> EpochRecord:
    """Returns a finished epoch of one step of one row, with a training loss of 1."""
    counts = {"steps": 1, "rows": 1, "seconds": 1.0, "learning_rate": 0.1}
    return EpochRecord(epoch=epoch, **{"train_loss": 1.0, "validation_loss": None, **counts, **changes})


def workers_of(mesh: Any) -> int:
    return math.prod(Mesh.of(mesh).size(axis) for axis in AXES)


def over(mesh: Any) -> dict[str, Any]:
    """Returns the settings of a training over `mesh`, with as many workers as it has."""
    return {"parallelism": mesh, "num_workers": workers_of(mesh)}


def train_gang(config: TrainConfig, objects: UserObjects | None = None) -> TrainResult:
    """Checks and trains on `config.num_workers` ranks; returns the result of rank 0."""
    return train_ranks(config, objects)[0]


def train_ranks(config: TrainConfig, objects: UserObjects | None = None) -> list[TrainResult]:
    """Checks and trains on `config.num_workers` ranks; returns the results of all ranks."""
    objects = objects or UserObjects()
    config = check_training(config, objects, ShardManifest.load(config.shards_uri)).config
    task = TrainTask(config=config, objects=user_code.dumps(objects))
    texts = run_spawned(config.num_workers, config.collective, task, timeout_seconds=120)
    return [TrainResult.from_json(text) for text in texts]


def train_in_turn(
    configs: dict[str, TrainConfig], objects: UserObjects | dict[str, UserObjects] | None = None
) -> dict[str, TrainResult]:
    """Checks all trainings and runs them on one gang; returns the results of rank 0.

    Starting a gang takes longer than a small training. `objects` may be a dict with one value per training.
    """
    each = objects if isinstance(objects, dict) else dict.fromkeys(configs, objects or UserObjects())
    given = {name: (config, each[name]) for name, config in configs.items()}
    return train_on_one_gang(given, catches=False)[0]


def train_on_one_gang(
    trainings: Mapping[str, tuple[TrainConfig, UserObjects]], *, catches: bool = True
) -> list[dict[str, Any]]:
    """Checks all trainings and runs them in order; returns one dict per rank, of results or error texts.

    Args:
        catches: Whether to continue after an error. All ranks must fail in the same way.
    """
    checked = {
        name: (check_training(config, objects, ShardManifest.load(config.shards_uri)).config, objects)
        for name, (config, objects) in trainings.items()
    }
    first = next(config for config, _ in checked.values())
    pickled = {name: (config, user_code.dumps(own)) for name, (config, own) in checked.items()}
    work = partial(_train_each, pickled, catches)
    return [
        {name: TrainResult.from_json(text) if trained else text for name, (trained, text) in own.items()}
        for own in run_ranks(first.num_workers, first.collective, work)
    ]


def train_in_threads(config: TrainConfig, objects: UserObjects | None = None) -> TrainResult:
    """Checks and trains on `config.num_workers` threads that take turns; returns the result of rank 0."""
    pickled = user_code.dumps(objects or UserObjects())
    manifest = ShardManifest.load(config.shards_uri)
    config = check_training(config, user_code.loads(pickled), manifest).config
    return run_in_turns(
        config.num_workers, lambda world: train_worker(config, world, user_code.loads(pickled))
    )[0]


class Runs:
    """Trainings below one folder, each in its own run folder.

    `data` is a manifest, columns, or a number of rows for `columns_of`. Equal `data` share their shards.
    `settings` are the defaults of all configs. If `objects` has a module, it replaces the `model`.
    """

    def __init__(
        self, make_shards: Callable[..., ShardManifest], folder: Path, settings: Mapping[str, Any]
    ) -> None:
        self.folder, self._make_shards, self._settings = folder, make_shards, settings
        self._written: dict[Any, tuple[Any, ShardManifest]] = {}
        self._numbers = count()

    def shards(self, data: Any, **options: Any) -> ShardManifest:
        """Writes columns, or a number of rows from `columns_of`; `options` go to `make_shards`."""
        columns = columns_of(data) if isinstance(data, int) else data
        return self._make_shards(columns, name=f"shards-{next(self._numbers)}", **options)

    def manifest(self, data: Any) -> ShardManifest:
        """Returns the manifest of `data`; writes the shards at the first call."""
        if isinstance(data, ShardManifest):
            return data
        # Keeps the columns too, so that no other columns get their id.
        key = data if isinstance(data, int) else id(data)
        if key not in self._written:
            self._written[key] = data, self.shards(data)
        return self._written[key][1]

    def config(
        self, data: Any, objects: UserObjects | None = None, *, run: str = "", **changes: Any
    ) -> TrainConfig:
        """Returns the config of a new run, in the folder `run` if given."""
        folder = self.folder / (run or f"run-{next(self._numbers)}")
        own = {"model": None} if objects is not None and objects.module is not None else {}
        return config_of(self.manifest(data), folder, **{**self._settings, **own, **changes})

    def check(self, data: Any, objects: UserObjects | None = None, **changes: Any) -> TrainConfig:
        config, manifest = self.config(data, objects, **changes), self.manifest(data)
        return check_training(config, objects or UserObjects(), manifest).config

    def here(self, data: Any, objects: UserObjects | None = None, **changes: Any) -> TrainResult:
        return train_here(self.config(data, objects, **changes), objects)

    def gang(self, data: Any, objects: UserObjects | None = None, **changes: Any) -> TrainResult:
        """Trains on spawned ranks; the default is two ranks with torch."""
        gang = {"num_workers": 2, "collective": "torch", **changes}
        return train_gang(self.config(data, objects, **gang), objects)


def _train_each(
    trainings: dict[str, tuple[TrainConfig, bytes]], catches: bool, collective: Collective
) -> dict[str, tuple[bool, str]]:
    found = {}
    for name, (config, objects) in trainings.items():
        try:
            result = train_worker(config, collective, user_code.loads(objects))
            found[name] = True, result.to_json()
        except Exception as error:
            if not catches:
                raise
            found[name] = False, f"{type(error).__name__}: {error}"
    return found


def state_of(result: TrainResult) -> dict[str, torch.Tensor]:
    return load_file(f"{result.checkpoint_uri}/{WEIGHTS}")


def weights_of(result: TrainResult, module: nn.Module) -> torch.Tensor:
    """Loads the checkpoint into `module`; returns all parameters, concatenated to 1-D."""
    map_checkpoint(result.checkpoint_uri, module)
    return torch.cat([p.detach().flatten() for p in module.parameters()])
