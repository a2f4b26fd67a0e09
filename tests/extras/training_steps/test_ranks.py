"""Custom training steps: N ranks train the weights of one rank, also if some ranks have no rows."""

from copy import deepcopy
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import own_training_steps as steps
import pytest
import torch
from parity import assert_equal_histories, assert_equal_states, difference, equal_to_undisturbed
from small_training import columns_of, config_of, state_of, train_in_turn, weights_of
from torch import nn
from written_shards import written

from ringspark.estimators.collectives.local_collective import LocalCollective
from ringspark.estimators.launch.local import train_here
from ringspark.estimators.training.check.driver import check_training
from ringspark.estimators.training.settings.config import TrainConfig, UserObjects
from ringspark.estimators.training.worker import TrainResult, train_worker
from ringspark.extras.certificate import verify_run
from ringspark.pipelines import ShardManifest

ROWS = 82
# 65 rows for training, 17 held out: with 16 rows per step, the last step of each has one row, so the other
# ranks have none.
HELD_OUT = np.arange(ROWS) % 5 == 1
CASES = ("gan", "weighted gan", "gan in file order", "contrastive", "triplet")


@pytest.fixture(scope="module")
def shards(tmp_path_factory: pytest.TempPathFactory) -> ShardManifest:
    rng = np.random.default_rng(3)
    x = rng.normal(size=(ROWS, 4)).astype(np.float32)
    columns = {"x": x, "y": x.sum(1), "point": rng.normal(size=(ROWS, 2)).astype(np.float32)}
    columns |= {"kind": rng.integers(0, 3, ROWS), "w": rng.uniform(0.5, 2, ROWS).astype(np.float32)}
    return written(tmp_path_factory.mktemp("own") / "shards", columns, row_group_rows=16, validation=HELD_OUT)


def case(name: str) -> tuple[dict[str, Any], UserObjects]:
    """Returns changes of the config, and the objects with the same initial weights in each call."""
    torch.manual_seed(0)
    if "gan" in name:
        changes: dict[str, Any] = {"label_columns": ("point",), "shuffle": name != "gan in file order"}
        if name == "weighted gan":
            changes |= {"weight_column": "w", "max_grad_norm": 0.5}
        return changes, UserObjects(
            module=steps.Gan(), training_step=steps.gan_step, optimizer=steps.gan_optimizers
        )
    if name.startswith("ordinary"):
        module = nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Linear(8, 1))
        if name == "ordinary":
            return {"training_step": None}, UserObjects(module=module)
        return {}, UserObjects(module=module, training_step=steps.ordinary_step)
    step = steps.contrastive_step if name == "contrastive" else steps.triplet_step
    return {"label_columns": ("kind",)}, UserObjects(module=steps.Encoder(), training_step=step)


def config(shards: ShardManifest, run: Path, name: str, ranks: int, **changes: Any) -> TrainConfig:
    own, objects = case(name)
    common = {"task": "any", "training_step": "own", "losses": ("auto",), "batch_size": 16}
    found = config_of(shards, run / f"{name} {ranks}", num_workers=ranks, **(common | own | changes))
    return check_training(found, objects, shards).config


def train_all(shards: Any, run: Path, ranks: int, collective: str, names: Any = CASES) -> Any:
    configs = {name: config(shards, run, name, ranks, collective=collective) for name in names}
    return train_in_turn(configs, {name: case(name)[1] for name in names})


def train_one(config: TrainConfig, objects: UserObjects) -> TrainResult:
    # A training changes the network that it gets.
    return train_worker(config, LocalCollective(), deepcopy(objects))


@pytest.fixture(scope="module")
def alone(shards: ShardManifest, tmp_path_factory: pytest.TempPathFactory) -> dict[str, TrainResult]:
    run = tmp_path_factory.mktemp("alone")
    return {name: train_one(config(shards, run, name, 1), case(name)[1]) for name in CASES}


@pytest.mark.distributed
@pytest.mark.parametrize(
    ("ranks", "collective"), [(2, "torch"), pytest.param(3, "horovod", marks=pytest.mark.slow)]
)
def test_ranks_train_like_one(shards: Any, alone: Any, tmp_path: Any, ranks: int, collective: str) -> None:
    results = train_all(shards, tmp_path, ranks, collective)
    for name, result in results.items():
        module = case(name)[1].module
        before = torch.cat([p.detach().flatten().clone() for p in module.parameters()])
        assert (weights_of(alone[name], module) - before).abs().max() > 1e-3, name
        assert difference(alone[name], result, module) < 1e-5, name
        assert_equal_histories(alone[name], result)


@pytest.mark.distributed
@pytest.mark.slow
def test_the_row_of_a_rank_without_rows_counts_nowhere(shards: ShardManifest, tmp_path: Path) -> None:
    """Batch norm shows it: its statistics would see the row."""
    results = train_all(shards, tmp_path, 3, "torch", ("ordinary step", "ordinary"))
    assert state_of(results["ordinary"])["1.num_batches_tracked"] > 0
    assert_equal_states(*results.values(), bound=1e-6)


def test_the_ordinary_loss_as_a_step_trains_the_ordinary_weights(shards: Any, tmp_path: Path) -> None:
    objects = UserObjects(module=nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 1)))
    settings = {"batch_size": 16, "weight_column": "w", "max_grad_norm": 0.1, "ema_decay": 0.5}
    plain = config_of(shards, tmp_path / "plain", **settings)
    own = replace(plain, run_uri=str(tmp_path / "own"), training_step="own")
    results = [
        train_one(check_training(given, of, shards).config, of)
        for given, of in ((plain, objects), (own, replace(objects, training_step=steps.ordinary_step)))
    ]
    assert_equal_states(*results)
    assert_equal_histories(*results, bound=1e-6)


def test_steps_without_weights_do_not_count_in_the_history(make_shards: Any, tmp_path: Path) -> None:
    columns = columns_of(64) | {"w": (np.arange(64) < 16).astype(np.float32)}
    manifest = make_shards(columns, row_group_rows=16)
    objects = UserObjects(module=nn.Linear(4, 1))
    plain = config_of(manifest, tmp_path / "plain", batch_size=16, weight_column="w", shuffle=False)
    own = replace(plain, run_uri=str(tmp_path / "own"), training_step="own")
    losses = [
        [record.train_loss for record in train_one(given, of).history]
        for given, of in ((plain, objects), (own, replace(objects, training_step=steps.ordinary_step)))
    ]
    assert losses[0] == pytest.approx(losses[1], rel=1e-6)


@pytest.mark.parametrize("precision", ["fp32", "fp16"])
def test_a_resumed_gan_is_an_undisturbed_one(shards: ShardManifest, tmp_path: Path, precision: str) -> None:
    objects = case("gan")[1]
    given = config(shards, tmp_path, "gan", 1, precision=precision, checkpoint_every_steps=2)
    pair = equal_to_undisturbed(given, objects, step=8, train=train_one)
    assert pair[1].resumed_steps == (6,)
    assert_equal_states(*pair)
    assert_equal_histories(*pair, bound=0.0)


def _overflows(step: Any) -> None:
    """Makes both optimizers skip every second step, as an overflow in fp16 does."""
    noise = step.inputs[0]
    factor = torch.inf if step.number % 2 else 1.0
    fake = step.module.generator(noise)
    for name, rows in (("discriminator", fake.detach()), ("generator", fake)):
        step.minimize(step.mean(step.module.discriminator(rows)[:, 0].square() * factor), name)


def test_a_step_with_two_skipped_optimizers_counts_once(shards: ShardManifest, tmp_path: Path) -> None:
    objects = replace(case("gan")[1], training_step=_overflows)
    given = replace(config(shards, tmp_path, "gan", 1), precision="fp16")
    result = train_one(given, objects)
    # Steps 1 and 3 of the five steps of an epoch.
    assert [record.skipped_steps for record in result.history] == [2, 2]
    assert all(np.isfinite(record.train_loss) for record in result.history)


@pytest.mark.slow
def test_a_replay_repeats_a_certified_gan_to_the_bit(shards: ShardManifest, tmp_path: Path) -> None:
    objects = case("gan")[1]
    given = config(shards, tmp_path, "gan", 1, certify=True, checkpoint_every_steps=4, collective="local")
    train_here(given, objects)
    found = verify_run(given.run_uri, intervals=None, model=objects)
    assert found.holds, found.table()
    other = replace(objects, training_step=_overflows)
    assert not verify_run(given.run_uri, intervals=1, model=other).holds
