"""Meshes with unusual networks: names, tied weights, frozen stages, random numbers."""

from __future__ import annotations

import copy
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from failing_callback import Fails
from ranks import run_ranks
from small_training import config_of, train_gang, weights_of, workers_of
from torch import nn

from ringspark.estimators import WorkerError
from ringspark.estimators.collectives import Collective
from ringspark.estimators.memory.pressure import check_on_rank
from ringspark.estimators.training.callbacks import Callback, TrainingState
from ringspark.estimators.training.settings.config import TrainConfig, UserObjects
from ringspark.models import ModelSpec
from ringspark.pipelines import ShardManifest

pytestmark = pytest.mark.distributed
MakeShards = Callable[..., ShardManifest]


def _network(tied: bool = False) -> nn.Sequential:
    torch.manual_seed(0)
    layers = OrderedDict(
        {
            "in/put": nn.Linear(8, 8),
            "first": nn.Tanh(),
            "middle": nn.Linear(8, 8),
            "second": nn.Tanh(),
            "last": nn.Linear(8, 1),
        }
    )
    if tied:
        layers["middle"].weight = layers["in/put"].weight
    return nn.Sequential(layers)


def _config(make_shards: MakeShards, folder: Path, **changes: Any) -> TrainConfig:
    rng = np.random.default_rng(0)
    x = rng.normal(size=(120, 8)).astype(np.float32)
    manifest = make_shards({"x": x, "y": (x[:, 0] - x[:, 1] * x[:, 2]).astype(np.float32)})
    settings: dict[str, Any] = {
        "batch_size": 20,
        "epochs": 2,
        "optimizer": "adamw",
        "max_grad_norm": 0.5,
        "collective": "torch",
    }
    return config_of(manifest, folder, **settings | changes)


def _over(config: TrainConfig, parallelism: dict[str, Any], **changes: Any) -> TrainConfig:
    workers = workers_of(parallelism)
    return replace(config, num_workers=workers, parallelism=parallelism, **changes)


def _difference(first: Any, second: Any) -> float:
    return float((weights_of(first, _network()) - weights_of(second, _network())).abs().max())


STAGES = {"pipeline": {"stages": 2, "cuts": ["middle"]}}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("first", "then"), [(STAGES, {}), ({}, STAGES), (STAGES, STAGES)], ids=["to one", "from one", "same"]
)
def test_layers_tied_over_stages_by_other_names_and_groups_of_one_stage_go_on(
    make_shards: MakeShards, tmp_path: Path, first: dict[str, Any], then: dict[str, Any]
) -> None:
    """A stage knows a tied weight by a name that is missing in the optimizer state of the network."""
    config = _config(
        make_shards,
        tmp_path / "run",
        checkpoint_every_steps=3,
        ema_decay=0.9,
        parameter_groups=({"params": ["last.*"], "learningRate": 0.003},),
    )
    network = _network(tied=True)
    straight = train_gang(replace(config, run_uri=str(tmp_path / "one")), UserObjects(module=network))
    objects = UserObjects(module=network, callbacks=(Fails(tmp_path / "failed"),))
    with pytest.raises(WorkerError, match="step 7"):
        train_gang(_over(config, first), objects)
    resumed = train_gang(_over(config, then), objects)
    assert resumed.resumed_steps in ((3,), (6,))
    assert _difference(straight, resumed) < 1e-6


class _Counts(nn.Module):
    """Counts its steps in an attribute and in a buffer that no state dict holds."""

    def __init__(self) -> None:
        super().__init__()
        self.calls = 0
        self.register_buffer("steps", torch.zeros(()), persistent=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if not self.training:
            return x
        self.calls += 1
        self.steps += 1
        return x * min(self.calls / 9, 1) / (1 + self.steps)


@pytest.mark.slow
def test_one_worker_continues_the_counters_of_later_stages(make_shards: MakeShards, tmp_path: Path) -> None:
    config = _config(make_shards, tmp_path / "run", checkpoint_every_steps=1, optimizer="sgd")
    layers = [*_network()]
    network = nn.Sequential(layers[0], _Counts(), *layers[1:4], _Counts(), layers[4])
    straight = train_gang(replace(config, run_uri=str(tmp_path / "one")), UserObjects(module=network))
    objects = UserObjects(module=network, callbacks=(Fails(tmp_path / "failed"),))
    with pytest.raises(WorkerError, match="step 7"):
        train_gang(_over(config, {"pipeline": 2}), objects)
    resumed = train_gang(config, objects)
    assert resumed.resumed_steps
    one, other = (weights_of(result, copy.deepcopy(network)) for result in (straight, resumed))
    assert float((one - other).abs().max()) < 1e-6
    assert not one.equal(nn.utils.parameters_to_vector(network.parameters()))


@pytest.mark.slow
def test_a_stage_may_be_frozen_whole(make_shards: MakeShards, tmp_path: Path) -> None:
    """A frozen stage has no optimizer state, average or gradients, and still joins every collective."""
    config = _config(
        make_shards,
        tmp_path / "one",
        freeze=("in/put.*",),
        ema_decay=0.9,
        checkpoint_every_steps=3,
        gradient_checkpointing=("in/put",),
    )
    objects = UserObjects(module=_network())
    one = train_gang(config, objects)
    many = train_gang(_over(config, STAGES, run_uri=str(tmp_path / "mesh")), objects)
    assert not many.checkpoint_errors
    assert _difference(one, many) < 1e-6


def test_a_cut_parameter_may_have_a_slash_in_its_name(make_shards: MakeShards, tmp_path: Path) -> None:
    config = _config(make_shards, tmp_path / "one", epochs=1)
    objects = UserObjects(module=_network())
    one = train_gang(config, objects)
    plan = {"tensor": 2, "plan": {"in/put": "column", "middle": "row"}}
    many = train_gang(_over(config, plan, run_uri=str(tmp_path / "mesh")), objects)
    assert _difference(one, many) < 1e-6


class Seeds(Callback):
    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def on_train_start(self, state: TrainingState) -> None:
        self._folder.joinpath(str(state.rank)).write_text(str(torch.initial_seed()))


TEXT = ModelSpec(
    "transformer_classifier",
    {"vocab_size": 23, "max_seq_len": 12, "dim": 16, "depth": 2, "num_heads": 4, "out_features": 3},
)


@pytest.mark.parametrize(
    ("axis", "streams"),
    [
        # Ranks with different tokens or blocks need different dropout masks.
        ("sequence", 2),
        pytest.param("pipeline", 2, marks=pytest.mark.slow),
        # Tensor ranks compute the same values and need the same dropout masks.
        pytest.param("tensor", 1, marks=pytest.mark.slow),
    ],
)
def test_ranks_with_other_tokens_or_blocks_have_random_numbers_of_their_own(
    make_shards: MakeShards, tmp_path: Path, axis: str, streams: int
) -> None:
    ids = np.random.default_rng(0).integers(1, 23, (40, 11))
    manifest = make_shards({"x": ids, "y": ids.sum(1) % 3})
    settings = {"model": TEXT.to_json(), "task": "any", "losses": ("cross_entropy",), "collective": "torch"}
    config = config_of(manifest, tmp_path / "run", epochs=1, **settings)
    seeds = tmp_path / "seeds"
    seeds.mkdir()
    train_gang(_over(config, {axis: 2}), UserObjects(callbacks=(Seeds(seeds),)))
    assert len({path.read_text() for path in seeds.iterdir()}) == streams


def test_rows_of_embeddings_are_clipped_in_a_stage_as_in_one_worker(
    make_shards: MakeShards, tmp_path: Path
) -> None:
    """An id that repeats in a batch repeats in the indices of the sparse gradient."""
    torch.manual_seed(0)
    network = nn.Sequential(nn.Embedding(5, 8, sparse=True), nn.Flatten(), nn.Linear(32, 1))
    ids = np.random.default_rng(0).integers(0, 5, (120, 4))
    manifest = make_shards({"x": ids, "y": (ids.sum(1) - 8).astype(np.float32)})
    config = config_of(
        manifest,
        tmp_path / "one",
        batch_size=20,
        optimizer="sgd",
        max_grad_norm=0.1,
        learning_rate=0.5,
        collective="torch",
    )
    objects = UserObjects(module=network)
    one = train_gang(config, objects)
    many = train_gang(_over(config, {"pipeline": 2}, run_uri=str(tmp_path / "mesh")), objects)
    difference = weights_of(one, copy.deepcopy(network)) - weights_of(many, copy.deepcopy(network))
    assert float(difference.abs().max()) < 1e-6


def test_ranks_of_one_copy_keep_the_same_rows(make_shards: MakeShards, tmp_path: Path) -> None:
    x = np.zeros((40, 8), np.float32)
    manifest = make_shards({"x": x, "y": x[:, 0]}, row_group_rows=40)
    config = _over(config_of(manifest, tmp_path / "run", collective="torch"), {"tensor": 2}, cache="auto")

    def settled(collective: Collective) -> Any:
        return check_on_rank(config, UserObjects(module=_network()), manifest, collective).cache

    # If ranks decided alone, only the one with the row group would cache.
    first, second = run_ranks(2, "torch", settled)
    assert first == second != "none"
