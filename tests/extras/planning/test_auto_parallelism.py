"""`parallelism="auto"`: data parallelism for a small network, sharding of a large one, resume."""

import json
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from small_training import columns_of, config_of
from torch import nn

from ringspark.estimators import TorchRegressor
from ringspark.estimators.memory.available import Available
from ringspark.estimators.options.mesh import Mesh
from ringspark.estimators.training.settings.config import TrainConfig, UserObjects
from ringspark.extras.planning.meshes import automatic
from ringspark.extras.planning.meshes.automatic import ChosenMesh, choose_parallelism
from ringspark.models import ModelSpec
from ringspark.pipelines import ShardManifest

MakeShards = Callable[..., ShardManifest]
SPEC = ModelSpec("mlp", {"in_features": 8, "hidden": [64] * 4, "out_features": 1})
NOTHING = UserObjects()


@pytest.fixture
def manifest(make_shards: MakeShards) -> ShardManifest:
    return make_shards(columns_of(64, 8))


@pytest.fixture(autouse=True)
def _estimated(monkeypatch: pytest.MonkeyPatch) -> None:
    """Replaces the measurement by an estimate. A gang would take most of the time of these tests."""
    monkeypatch.setattr(automatic, "MOST_SECONDS", 0.0)


@pytest.fixture
def choose(manifest: ShardManifest) -> Callable[..., ChosenMesh]:
    return lambda config, objects=NOTHING, **options: choose_parallelism(config, objects, manifest, **options)


@pytest.fixture
def make(manifest: ShardManifest, tmp_path: Path) -> Callable[..., TrainConfig]:
    # The budgets below have no room for the copy of a checkpoint.
    settings = {"model": SPEC, "collective": "torch", "checkpoint_every_seconds": 0.0}
    return partial(config_of, manifest, tmp_path / "run", num_workers=2, **settings)


def test_a_small_network_stays_whole_and_nothing_is_measured(make: Any, choose: Any) -> None:
    config = make()
    choice = choose(config, limits=[None])
    assert choice.config == config
    assert choice.config.parallelism == Mesh()
    assert choice.explanation.startswith("data parallelism: the network is small, ")
    alone = choose(replace(config, num_workers=1))
    assert alone.config.parallelism == Mesh()
    assert alone.explanation == "one worker has the whole network"


def test_a_network_that_does_not_fit_is_cut_and_trains(make: Any, choose: Any) -> None:
    config = make()
    # About 13,000 parameters, gradients, two moments of each and the sum; half of the network has half of
    # them.
    budget = 200_000
    choice = choose(config, budget=budget)
    found = choice.config
    assert found.cuts_network
    assert found.axes["tensor"] * found.axes["pipeline"] == 2
    assert "needs 2" in choice.explanation
    assert "data parallelism is not possible: needs" in choice.explanation
    assert replace(found, parallelism={}, gradient_accumulation=1) == config
    # The limit of the machine applies if the user sets none.
    limits = [None, Available(num_bytes=budget, source="here")]
    assert choose(config, limits=limits).config == found
    with pytest.raises(
        ValueError, match="parallelism='auto' found no mesh: no mesh of 2 workers fits: the smallest"
    ):
        choose(config, budget=1000)


def test_micro_batches_that_the_user_set_stay(make: Any, choose: Any) -> None:
    config = make(gradient_accumulation=2)
    found = choose(config, budget=200_000, chooses_micro=False).config
    assert found.cuts_network
    assert found.gradient_accumulation == 2


def test_batch_normalization_keeps_the_micro_batches_of_the_user(make: Any, choose: Any) -> None:
    blocks = [nn.Sequential(nn.Conv1d(256, 256, 1), nn.BatchNorm1d(256)) for _ in range(4)]
    ends = nn.Sequential(nn.Unflatten(1, (1, 8)), nn.Conv1d(1, 256, 1)), nn.Linear(256 * 8, 1)
    network = nn.Sequential(ends[0], *blocks, nn.Flatten(), ends[1])
    config = make(model=None)
    found = choose(config, UserObjects(module=network), budget=4_500_000).config
    assert found.axes["pipeline"] == 2
    assert found.gradient_accumulation == 1


class Mixing(nn.Module):
    """Mixes features, although its plan leaves each rank only some of them."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(8, 1024), nn.Linear(1024, 1)

    def tensor_plan(self, ranks: int) -> dict[str, str]:
        return {"up": "column", "down": "row"}

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down(torch.softmax(self.up(x), -1))  # type: ignore[no-any-return]


def test_a_mesh_that_computes_something_else_is_not_chosen(make: Any, choose: Any) -> None:
    config = make(model=None)
    with pytest.warns(UserWarning, match="uses data parallelism: model Mixing under .* output 0 is off by"):
        choice = choose(config, UserObjects(module=Mixing()), budget=150_000)
    assert choice.config == config


def test_a_run_keeps_its_mesh_unless_it_has_other_workers(make: Any, choose: Any) -> None:
    config = make()
    begun = replace(config, parallelism={"pipeline": 2}, gradient_accumulation=8)
    choice = choose(config, begun=begun)
    assert choice.config == begun
    assert choice.explanation == "pipeline 2 is kept from the resumed run"
    more = choose(replace(config, num_workers=4), begun=begun, budget=200_000).config
    assert more.cuts_network
    # The run's identity contains the mesh, because batch normalization depends on it.
    assert more.gradient_accumulation == 8
    refused = choose(replace(config, noise_scale=True), begun=begun)
    assert refused.config.parallelism == Mesh()


def test_settings_and_networks_that_cannot_be_cut_leave_whole_copies(make: Any, choose: Any) -> None:
    config = make(collective="horovod")
    choice = choose(config, budget=1)
    assert choice.config == config
    assert "no other mesh is possible, because parallelism" in choice.explanation
    assert "'horovod' does not have" in choice.explanation

    class Looks(Mixing):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return super().forward(x if x.sum() > 0 else -x)

    config = make(model=None)
    with pytest.warns(UserWarning, match="uses data parallelism: model Looks does not run without data"):
        choice = choose(config, UserObjects(module=Looks()), budget=1)
    assert choice.config == config


@pytest.mark.slow
@pytest.mark.distributed
def test_a_network_that_is_not_small_is_measured(make: Any, choose: Any, monkeypatch: Any) -> None:
    monkeypatch.setattr(automatic, "MOST_SECONDS", 60.0)
    wide = ModelSpec("mlp", {"in_features": 8, "hidden": [768] * 3, "out_features": 1})
    config = make(model=wide.to_json())
    choice = choose(config)
    assert choice.explanation.startswith("Steps measured here: ")
    for name in ("data 2", "tensor 2", "pipeline 2"):
        assert name in choice.explanation
    assert choice.config.parallelism.to_values().keys() <= {"tensor", "pipeline"}


@pytest.mark.spark
@pytest.mark.slow
def test_a_fit_notes_what_was_chosen(spark: Any, tmp_path: Path) -> None:
    frame = spark.range(64).selectExpr("array(double(id), -double(id)) as features", "double(id) as label")
    network = ModelSpec("mlp", {"in_features": 2, "hidden": [64] * 4, "out_features": 1})
    settings = {"model": network, "numWorkers": 2, "batchSize": 32, "epochs": 1, "learningRate": 1e-4}
    settings |= {"parallelism": "auto", "showProgress": False}
    small = TorchRegressor(**settings, runUri=str(tmp_path / "small")).fit(frame)
    assert small.summary.parallelism == {}
    model = TorchRegressor(
        **settings, memoryBudget=200_000, checkpointEverySeconds=0, runUri=str(tmp_path / "cut")
    ).fit(frame)
    chosen = model.summary.parallelism
    assert {"tensor", "pipeline"} & chosen.keys()
    noted = json.loads((tmp_path / "cut" / "config.json").read_text())
    assert noted["parallelism"] == chosen
    assert "is chosen" in (tmp_path / "cut" / "parallelism.txt").read_text()
    assert model.transform(frame).count() == 64
    assert TorchRegressor(**settings).getParallelism() == "auto"
