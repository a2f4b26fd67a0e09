"""A non-finite loss or gradient stops the training, skips the step, or rolls back, with a report."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import small_training
import torch
from ranks import TORCH_AND_SLOW_OTHERS, run_ranks
from short_sync import sync_of
from torch import nn

from ringspark.estimators import WorkerError
from ringspark.estimators.collectives import Collective
from ringspark.estimators.launch.local import train_here
from ringspark.estimators.options.sync import Zero
from ringspark.estimators.training.callbacks import Callback, TrainingState
from ringspark.estimators.training.check.driver import check_training
from ringspark.estimators.training.checkpoint.weights import load_checkpoint
from ringspark.estimators.training.history import read_history
from ringspark.estimators.training.non_finite import FirstBadLoss, NonFiniteStep, raise_first_bad
from ringspark.estimators.training.settings.config import TrainConfig, UserObjects
from ringspark.estimators.training.worker import TrainResult, train_worker
from ringspark.models import ModelSpec
from ringspark.pipelines import ShardManifest

MakeShards = Callable[..., ShardManifest]
# Row 37 of 80, in file order: step 3 of 16 rows each, in every epoch.
BAD_ROW = 37
POISON = 99.0


pytestmark = pytest.mark.usefixtures("one_thread")


class Net(nn.Module):
    """Has running statistics that a bad row would spoil; `bursts` passes fail, from the sixth on."""

    def __init__(self, bursts: int = 0) -> None:
        super().__init__()
        blocks = [nn.Sequential(nn.Linear(4, 4), nn.Tanh()) for _ in range(2)]
        self.blocks = nn.Sequential(*blocks)
        self.norm, self.last = nn.BatchNorm1d(4), nn.Linear(4, 1)
        self.bursts, self.calls = bursts, 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        # Shards with NaN are refused, but a network can still produce NaN.
        x = torch.where(x == POISON, math.nan, x)
        output: torch.Tensor = self.last(self.blocks(self.norm(x)))
        if self.training:
            self.calls += 1
            if self.calls >= 6 and self.bursts:
                self.bursts -= 1
                return output * math.inf
        return output


def net(bursts: int = 0) -> Net:
    torch.manual_seed(0)
    return Net(bursts)


class RootLoss:
    """Is finite at zero, but its gradient is not."""

    def __call__(self, output: torch.Tensor, label: torch.Tensor) -> torch.Tensor:
        return ((output[:, 0] - label).abs() * (label != 7.0)).sqrt()


def data(make_shards: MakeShards, bad: float | None = POISON, **options: Any) -> ShardManifest:
    """Returns 5 steps of 16 rows per epoch."""
    features = np.random.default_rng(0).normal(size=(80, 4)).astype(np.float32)
    label = features.sum(1)
    if bad is not None:
        features[BAD_ROW, 2] = bad
    return make_shards({"x": features, "y": label}, num_files=1, row_group_rows=16, **options)


config_of = partial(small_training.config_of, batch_size=16, metrics=("mae",), shuffle=False)


def objects(bursts: int = 0, **changes: Any) -> UserObjects:
    return UserObjects(module=net(bursts), **changes)


def is_finite(result: TrainResult) -> bool:
    module = net()
    load_checkpoint(result.checkpoint_uri, module)
    return all(bool(t.isfinite().all()) for t in module.state_dict().values())


def test_stop_names_epoch_step_and_rank(make_shards: MakeShards, tmp_path: Path) -> None:
    config = config_of(data(make_shards), tmp_path / "run")
    with pytest.raises(
        FloatingPointError, match=r"not finite in epoch 1, step 3 on rank 0; .*onNonFinite='skip'"
    ):
        train_here(config, objects())


@pytest.mark.parametrize("at_once", [True, False], ids=["CPU", "as on a GPU"])
def test_the_first_bad_loss_is_noted(at_once: bool) -> None:
    first = FirstBadLoss(torch.device("cpu"))
    first.is_immediate = at_once
    for step, loss in enumerate((1.0, math.inf, math.nan, 2.0), 1):
        first.check(torch.tensor([0.0, loss]), step)
    assert first.step == 2
    first.reset()
    assert first.step is None


def test_the_first_bad_step_of_all_ranks_is_named() -> None:
    with pytest.raises(FloatingPointError, match="epoch 2, step 3 on rank 2"):
        raise_first_bad(2, [0, 5, 3, 3], "")


@pytest.mark.parametrize("precision", ["fp32", "fp16"])
def test_skip_leaves_the_step_out(make_shards: MakeShards, tmp_path: Path, precision: str) -> None:
    changes: dict[str, Any] = {"on_non_finite": "skip", "max_grad_norm": 1.0, "precision": precision}
    result = train_here(config_of(data(make_shards), tmp_path / "run", **changes), objects())
    assert result.non_finite == tuple(
        NonFiniteStep(epoch=epoch, step=3, ranks=(0,), action="skipped") for epoch in (1, 2)
    )
    assert is_finite(result)
    assert all(math.isfinite(record.train_loss) for record in result.history)
    if precision == "fp32":
        assert [record.skipped_steps for record in result.history] == [1, 1]


class _Replaces(Net):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        output = super().forward(x)
        if self.training:
            self.mean = self.mean * 0.9 + 0.1 * output.detach().mean()
        return output


def test_skip_takes_back_a_buffer_that_the_pass_replaced(make_shards: MakeShards, tmp_path: Path) -> None:
    network = _Replaces()
    network.register_buffer("mean", torch.zeros(()))
    config = config_of(data(make_shards), tmp_path / "run", on_non_finite="skip")
    result = train_here(config, UserObjects(module=network))
    load_checkpoint(result.checkpoint_uri, network)
    assert network.mean.isfinite()


class _Stops(Callback):
    def __init__(self, at: int | None = None) -> None:
        self._at = at

    def on_step_end(self, state: TrainingState) -> None:
        if state.step == self._at:
            raise RuntimeError("stopped")


def test_a_resumed_training_names_the_steps_skipped_before(make_shards: MakeShards, tmp_path: Path) -> None:
    manifest = data(make_shards)
    changes: dict[str, Any] = {"on_non_finite": "skip", "checkpoint_every_steps": 1}
    expected = train_here(config_of(manifest, tmp_path / "plain", **changes), objects())
    config = config_of(manifest, tmp_path / "run", **changes)
    with pytest.raises(RuntimeError, match="stopped"):
        train_here(config, objects(callbacks=(_Stops(6),)))
    result = train_here(config, objects(callbacks=(_Stops(),)))
    assert len(result.resumed_steps) == 1
    assert result.non_finite == expected.non_finite


def test_skip_changes_nothing_where_all_is_finite(make_shards: MakeShards, tmp_path: Path) -> None:
    manifest = data(make_shards, bad=None)
    weights = []
    for policy in ("stop", "skip"):
        config = config_of(manifest, tmp_path / policy, on_non_finite=policy, max_grad_norm=0.5)
        result, module = train_here(config, objects()), net()
        load_checkpoint(result.checkpoint_uri, module)
        weights.append(module.state_dict())
        assert result.non_finite == ()
    assert all(weights[0][name].equal(weights[1][name]) for name in weights[0])


def test_a_gradient_alone_is_enough_to_skip(make_shards: MakeShards, tmp_path: Path) -> None:
    columns = {"x": np.random.default_rng(0).normal(size=(64, 4)).astype(np.float32)}
    columns["y"] = np.where(np.arange(64) == BAD_ROW, 7.0, 1.0).astype(np.float32)
    manifest = make_shards(columns, num_files=1)
    config = config_of(manifest, tmp_path / "run", on_non_finite="skip", losses=("custom",), epochs=1)
    result = train_here(config, objects(losses=(RootLoss(),)))
    assert result.non_finite == (NonFiniteStep(epoch=1, step=3, ranks=(), action="skipped"),)
    assert "step 3: the summed gradients are not finite" in str(result.non_finite[0])
    assert is_finite(result)


def test_rollback_goes_back_with_half_the_rate(make_shards: MakeShards, tmp_path: Path) -> None:
    config = config_of(
        data(make_shards, bad=None), tmp_path / "run", on_non_finite="rollback", checkpoint_every_steps=4
    )
    # The sixth pass fails, and again in the next attempt.
    result = train_here(config, objects(bursts=2))
    assert [(found.epoch, found.step, found.action) for found in result.non_finite] == [
        (2, 1, "rolled back"),
        (1, 5, "rolled back"),
    ]
    assert (result.steps, [record.epoch for record in result.history]) == (10, [1, 2])
    assert result.history[0].learning_rate == result.history[1].learning_rate == 0.01 / 4
    assert read_history(result.run_uri) == list(result.history)
    assert is_finite(result)


@pytest.mark.parametrize("optimizer", ["adamw", "adagrad"])
def test_rollback_to_the_first_weights_takes_the_optimizers_state_back_too(
    make_shards: MakeShards, tmp_path: Path, optimizer: str
) -> None:
    """Before its first step, an optimizer has no state, or only the state from its constructor."""
    manifest = data(make_shards, bad=None)
    settings: dict[str, Any] = {"optimizer": optimizer, "checkpoint_every_steps": 100}
    config = config_of(manifest, tmp_path / "run", on_non_finite="rollback", **settings)
    result = train_here(config, objects(bursts=1))
    assert [found.action for found in result.non_finite] == ["rolled back"]
    half = config_of(manifest, tmp_path / "half", learning_rate=config.learning_rate / 2, **settings)
    expected = train_here(half, objects())
    states = []
    for each in (result, expected):
        module = net()
        load_checkpoint(each.checkpoint_uri, module)
        states.append(module.state_dict())
    assert [name for name in states[0] if not states[0][name].equal(states[1][name])] == []


def test_rollback_ends_where_it_does_not_help(make_shards: MakeShards, tmp_path: Path) -> None:
    manifest = data(make_shards)
    config = config_of(manifest, tmp_path / "run", on_non_finite="rollback", checkpoint_every_steps=2)
    with pytest.raises(
        FloatingPointError,
        match=r"epoch 1, step 3: the loss of rank 0 .* 5 rollbacks to step 2, .* did not help; lower",
    ):
        train_here(config, objects())


class InfiniteLoss:
    """Is infinite at label 7, without a gradient there."""

    def __call__(self, output: torch.Tensor, label: torch.Tensor) -> torch.Tensor:
        return torch.where(label == 7.0, math.inf, (output[:, 0] - label).square())


@pytest.mark.distributed
@pytest.mark.parametrize("sharding", ["none", pytest.param("gradients", marks=pytest.mark.slow)])
def test_ranks_skip_what_one_rank_skips_and_report_its_loss(
    make_shards: MakeShards, tmp_path: Path, sharding: str
) -> None:
    """The bad row is its rank's only row in the step."""
    columns = {"x": np.random.default_rng(0).normal(size=(16, 4)).astype(np.float32)}
    columns["y"] = np.where(np.arange(16) == 5, 7.0, columns["x"].sum(1)).astype(np.float32)
    config = config_of(
        make_shards(columns, num_files=1),
        tmp_path / "one",
        on_non_finite="skip",
        losses=("custom",),
        batch_size=2,
        model=ModelSpec("linear", {"in_features": 4, "out_features": 1}).to_json(),
    )
    gang = replace(
        config,
        run_uri=str(tmp_path / "two"),
        num_workers=2,
        collective="torch",
        sync=sync_of(sharding=sharding),
    )
    own = UserObjects(losses=(InfiniteLoss(),))
    one, two = train_here(config, own), small_training.train_gang(gang, own)
    assert [(found.epoch, found.step) for found in two.non_finite] == [(1, 3), (2, 3)]
    assert [(found.epoch, found.step) for found in one.non_finite] == [(1, 3), (2, 3)]
    for mine, theirs in zip(one.history, two.history, strict=True):
        assert mine.train_loss == pytest.approx(theirs.train_loss, rel=1e-5)
        assert mine.metrics == pytest.approx(theirs.metrics, rel=1e-5)


CASES: dict[str, dict[str, Any]] = {
    "plain": {"max_grad_norm": 1.0},
    "accumulation": {"gradient_accumulation": 2},
    "optimizer": {"sync": Zero(stage=1), "max_grad_norm": 1.0},
    "gradients": {"sync": Zero(stage=2)},
    "parameters": {"sync": Zero(stage=3)},
}


def _gang(configs: dict[str, TrainConfig], last: TrainConfig, collective: Collective) -> None:
    """Trains every skip case and a rollback, then a policy that ends the gang."""
    results = {
        name: train_worker(config, collective, objects(bursts=int(name == "rollback"))).to_json()
        for name, config in configs.items()
    }
    Path(last.run_uri).mkdir(exist_ok=True)
    (Path(last.run_uri) / f"{collective.rank}.json").write_text(json.dumps(results))
    train_worker(last, collective, objects())


@pytest.mark.distributed
@pytest.mark.parametrize("collective", TORCH_AND_SLOW_OTHERS)
def test_two_ranks_decide_together(make_shards: MakeShards, tmp_path: Path, collective: str) -> None:
    bad, good = data(make_shards, name="bad"), data(make_shards, bad=None, name="good")
    gang: dict[str, Any] = {"num_workers": 2, "collective": collective}
    configs = {
        name: config_of(bad, tmp_path / name, on_non_finite="skip", **gang, **changes)
        for name, changes in CASES.items()
        if (name, collective) != ("parameters", "horovod")
    }
    configs["rollback"] = config_of(
        good, tmp_path / "rollback", on_non_finite="rollback", checkpoint_every_steps=4, **gang
    )
    configs = {
        name: check_training(config, objects(), ShardManifest.load(config.shards_uri)).config
        for name, config in configs.items()
    }
    last = replace(configs["plain"], run_uri=str(tmp_path / "last"), on_non_finite="stop")
    with pytest.raises(WorkerError, match=r"not finite in epoch 1, step 3 on rank [01]; lower"):
        run_ranks(2, collective, partial(_gang, configs, last))
    ranks = [json.loads((tmp_path / "last" / f"{rank}.json").read_text()) for rank in (0, 1)]
    for name in configs:
        first, second = (TrainResult.from_json(results[name]) for results in ranks)
        assert first.non_finite == second.non_finite, name
        assert is_finite(first), name
        if name == "rollback":
            assert [found.action for found in first.non_finite] == ["rolled back"]
            assert first.history[-1].learning_rate == 0.005
            continue
        assert [(found.epoch, found.step) for found in first.non_finite] == [(1, 3), (2, 3)], name
        # One bad row, so one rank has a bad loss.
        assert {len(found.ranks) for found in first.non_finite} == {1}, name
        assert [record.skipped_steps for record in first.history] == [1, 1], name
