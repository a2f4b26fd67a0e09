"""Meshes with unusual networks (names, tied weights, frozen stages, random numbers) or few bits."""

import copy
import math
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from acting_callback import Acts
from parity import difference, equal_to_undisturbed
from parity import equal_to_one_worker as equal_to_a_worker
from ranks import run_ranks
from small_training import columns_of, config_of, over, train_gang, train_in_turn, weights_of
from torch import nn

from ringspark.estimators.collectives import Collective
from ringspark.estimators.launch.local import train_here
from ringspark.estimators.memory.pressure import check_on_rank
from ringspark.estimators.training.settings.config import TrainConfig, UserObjects
from ringspark.models import ModelSpec

pytestmark = pytest.mark.distributed
equal_to_one_worker = partial(equal_to_a_worker, alone=train_here)
MakeConfig = Callable[..., TrainConfig]


def _network(tied: bool = False) -> nn.Sequential:
    torch.manual_seed(0)
    layers = nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 1)
    if tied:
        layers[2].weight = layers[0].weight
    names = ("in/put", "first", "middle", "second", "last")
    return nn.Sequential(OrderedDict(zip(names, layers, strict=True)))


@pytest.fixture
def config(make_shards: Any, tmp_path: Path) -> MakeConfig:
    settings = {"optimizer": "adamw", "max_grad_norm": 0.5, "collective": "torch", "batch_size": 20}
    return partial(config_of, make_shards(columns_of(120, 8)), tmp_path / "run", **settings)


STAGES = {"pipeline": {"stages": 2, "cuts": ["middle"]}}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("first", "then"), [(STAGES, {}), ({}, STAGES), (STAGES, STAGES)], ids=["to one", "from one", "same"]
)
def test_layers_tied_over_stages_and_groups_of_one_stage_resume(config: Any, first: Any, then: Any) -> None:
    """A stage knows a tied weight by a name that is missing in the optimizer state of the network."""
    groups = ({"params": ["last.*"], "learningRate": 0.003},)
    made = config(checkpoint_every_steps=3, ema_decay=0.9, parameter_groups=groups)
    objects = UserObjects(module=_network(tied=True))
    equal_to_one_worker(made, objects, bound=1e-6, parallelism=STAGES)
    equal_to_undisturbed(made, objects, first=over(first), then=over(then), bound=1e-6)


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
def test_one_worker_continues_the_counters_of_later_stages(config: MakeConfig) -> None:
    layers = [*_network()]
    network = nn.Sequential(layers[0], _Counts(), *layers[1:4], _Counts(), layers[4])
    made, staged = config(checkpoint_every_steps=1, optimizer="sgd"), over({"pipeline": 2})
    objects = UserObjects(module=network)
    equal_to_one_worker(made, objects, bound=1e-6, **staged)
    one, _ = equal_to_undisturbed(made, objects, first=staged, then={}, bound=1e-6)
    trained = weights_of(one, copy.deepcopy(network))
    assert not trained.equal(nn.utils.parameters_to_vector(network.parameters()))


@pytest.mark.slow
def test_a_stage_may_be_frozen_whole(config: MakeConfig) -> None:
    """A frozen stage has no optimizer state, average or gradients, and still joins every collective."""
    frozen = {"freeze": ("in/put.*",), "gradient_checkpointing": ("in/put",)}
    made = config(ema_decay=0.9, checkpoint_every_steps=3, **frozen)
    _, many = equal_to_one_worker(made, UserObjects(module=_network()), bound=1e-6, parallelism=STAGES)
    assert not many.checkpoint_errors


def test_a_cut_parameter_may_have_a_slash_in_its_name(config: MakeConfig) -> None:
    plan = {"tensor": 2, "plan": {"in/put": "column", "middle": "row"}}
    equal_to_one_worker(config(epochs=1), UserObjects(module=_network()), bound=1e-6, parallelism=plan)


SIZES = {"vocab_size": 23, "max_seq_len": 12, "dim": 16, "depth": 2, "num_heads": 4, "out_features": 3}


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
    make_shards: Any, tmp_path: Path, axis: str, streams: int
) -> None:
    ids = np.random.default_rng(0).integers(1, 23, (40, 11))
    manifest, spec = make_shards({"x": ids, "y": ids.sum(1) % 3}), ModelSpec("transformer_classifier", SIZES)
    settings = {"model": spec, "task": "any", "losses": ("cross_entropy",), "collective": "torch"}
    seeds = tmp_path / "seeds"
    seeds.mkdir()
    config = config_of(manifest, tmp_path / "run", epochs=1, **settings, **over({axis: 2}))
    write = lambda state: (seeds / str(state.rank)).write_text(str(torch.initial_seed()))  # noqa: E731
    train_gang(config, UserObjects(callbacks=(Acts(train_start=write),)))
    assert len({path.read_text() for path in seeds.iterdir()}) == streams


def test_rows_of_embeddings_are_clipped_in_a_stage_as_in_one_worker(make_shards: Any, tmp_path: Path) -> None:
    """An id that repeats in a batch repeats in the indices of the sparse gradient."""
    torch.manual_seed(0)
    network = nn.Sequential(nn.Embedding(5, 8, sparse=True), nn.Flatten(), nn.Linear(32, 1))
    ids = np.random.default_rng(0).integers(0, 5, (120, 4))
    manifest = make_shards({"x": ids, "y": (ids.sum(1) - 8).astype(np.float32)})
    settings = {"optimizer": "sgd", "max_grad_norm": 0.1, "learning_rate": 0.5, "collective": "torch"}
    config = config_of(manifest, tmp_path / "run", batch_size=20, **settings)
    equal_to_one_worker(config, UserObjects(module=network), bound=1e-6, parallelism={"pipeline": 2})


def test_ranks_of_one_copy_keep_the_same_rows(make_shards: Any, tmp_path: Path) -> None:
    manifest = make_shards(columns_of(40, 8), row_group_rows=40)
    settings = {"collective": "torch", "cache": "auto", **over({"tensor": 2})}
    config = config_of(manifest, tmp_path / "run", **settings)

    def settled(collective: Collective) -> Any:
        return check_on_rank(config, UserObjects(module=_network()), manifest, collective).cache

    # If ranks decided alone, only the one with the row group would cache.
    first, second = run_ranks(2, "torch", settled)
    assert first == second != "none"


MLP = ModelSpec("mlp", {"in_features": 16, "hidden": [128, 128], "out_features": 1, "activation": "tanh"})
TEXT = SIZES | {"dim": 32, "out_features": 1}
EXPERTS = {"num_experts": 4, "router": "gshard", "every": 2}
TEXTS = {
    "sequence": ModelSpec("transformer_classifier", TEXT),
    "expert": ModelSpec("transformer_classifier", {**TEXT, "experts": EXPERTS}),
}
BAD_LABEL = 100.0


def infinite_loss(output: torch.Tensor, label: torch.Tensor) -> torch.Tensor:
    return torch.where(label == BAD_LABEL, math.inf, (output[:, 0] - label).square())


@pytest.fixture
def two(make_shards: Any, tmp_path: Path) -> MakeConfig:
    return partial(_two, make_shards, tmp_path / "two")


def _two(make_shards: Any, run: Path, axis: str, **changes: Any) -> TrainConfig:
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
    # Key biases get only rounding errors as gradients, which Adam would turn into full steps.
    settings = {"model": spec, "batch_size": 100, "epochs": 4, "optimizer": "momentum", "shuffle": False}
    settings |= {"collective": "torch", "num_workers": 2, "parallelism": {axis: 2}}
    return config_of(make_shards({"x": x, "y": y}, num_files=1), run, **settings | changes)


def _one(config: TrainConfig) -> TrainConfig:
    return replace(config, run_uri=f"{config.run_uri}-one", num_workers=1, parallelism={})


@pytest.mark.slow
@pytest.mark.parametrize("precision", ["fp32", "fp16"])
@pytest.mark.parametrize("axis", ["tensor", "sequence", "expert", "pipeline"])
def test_a_mesh_skips_the_steps_that_one_worker_skips(two: MakeConfig, axis: str, precision: str) -> None:
    changes = {"on_non_finite": "skip", "losses": ("custom",), "precision": precision}
    changes |= {"gradient_accumulation": 2 if axis == "pipeline" else 1}
    made = two(axis, **changes)
    own = UserObjects(losses=(infinite_loss,))
    many, one = train_gang(made, own), train_gang(_one(made), own)
    for result in (many, one):
        assert [(found.epoch, found.step) for found in result.non_finite] == [(n, 4) for n in (1, 2, 3, 4)]
    assert many.history[-1].train_loss < many.history[0].train_loss
    if precision == "fp32":
        assert difference(many, one, made) < 1e-5
    assert many.history[-1].train_loss == pytest.approx(one.history[-1].train_loss, rel=0.1)


@pytest.mark.slow
def test_a_mesh_rolls_back_as_one_worker_does(two: MakeConfig) -> None:
    changes = {"on_non_finite": "rollback", "losses": ("custom",), "checkpoint_every_steps": 2}
    made = two("tensor", **changes)
    own = UserObjects(losses=(infinite_loss,))
    for each in (made, _one(made)):
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
def test_packed_activations_train_over_a_mesh(two: MakeConfig, tmp_path: Path, axis: str) -> None:
    made = two(axis)
    results = train_in_turn(
        {name: replace(made, run_uri=str(tmp_path / name), **own) for name, own in PACKED.items()}
    )
    plain = results["plain"]
    assert difference(plain, train_gang(_one(made)), made) < 1e-5
    assert plain.history[-1].train_loss < plain.history[0].train_loss
    for exact in ("bits", "disk"):
        assert difference(plain, results[exact], made) == 0
    for lossy in ("int8", "fp8"):
        assert 0 < difference(plain, results[lossy], made) < 0.05
        for mine, theirs in zip(results[lossy].history, plain.history, strict=True):
            assert mine.train_loss == pytest.approx(theirs.train_loss, rel=0.05)
