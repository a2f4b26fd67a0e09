"""A non-finite loss or gradient stops the training, skips the step, or rolls back, with a report."""

import math
from typing import Any

import numpy as np
import pytest
import torch
from parity import assert_equal_histories, assert_equal_states, equal_to_undisturbed
from short_sync import sync_of
from small_training import Runs, columns_of, state_of, train_on_one_gang
from torch import nn

from ringspark.estimators import WorkerError
from ringspark.estimators.launch.local import train_here
from ringspark.estimators.options.sync import Zero
from ringspark.estimators.training.callbacks import Callback, TrainingState
from ringspark.estimators.training.history import read_history
from ringspark.estimators.training.non_finite import FirstBadLoss, NonFiniteStep, raise_first_bad
from ringspark.estimators.training.settings.config import UserObjects
from ringspark.estimators.training.worker import TrainResult
from ringspark.models import ModelSpec
from ringspark.pipelines import ShardManifest

# 5 steps of 16 rows per epoch.
SETTINGS = {"batch_size": 16, "metrics": ("mae",), "shuffle": False}
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


def root_loss(output: torch.Tensor, label: torch.Tensor) -> torch.Tensor:
    """Is finite at zero, but its gradient is not."""
    return ((output[:, 0] - label).abs() * (label != 7.0)).sqrt()


def data(runs: Runs, bad: bool = True) -> ShardManifest:
    columns = columns_of(80)
    if bad:
        columns["x"][BAD_ROW, 2] = POISON
    return runs.shards(columns, num_files=1, row_group_rows=16)


def objects(bursts: int = 0, **changes: Any) -> UserObjects:
    return UserObjects(module=net(bursts), **changes)


def is_finite(result: TrainResult) -> bool:
    return all(bool(t.isfinite().all()) for t in state_of(result).values())


def test_stop_names_epoch_step_and_rank(runs: Runs) -> None:
    message = r"not finite in epoch 1, step 3 on rank 0; .*onNonFinite='skip'"
    with pytest.raises(FloatingPointError, match=message):
        runs.here(data(runs), objects())


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
def test_skip_leaves_the_step_out(runs: Runs, precision: str) -> None:
    changes = {"on_non_finite": "skip", "max_grad_norm": 1.0, "precision": precision}
    result = runs.here(data(runs), objects(), **changes)
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


def test_skip_takes_back_a_buffer_that_the_pass_replaced(runs: Runs) -> None:
    network = _Replaces()
    network.register_buffer("mean", torch.zeros(()))
    result = runs.here(data(runs), UserObjects(module=network), on_non_finite="skip")
    assert state_of(result)["mean"].isfinite()


def test_a_resumed_training_names_the_steps_skipped_before(runs: Runs) -> None:
    config = runs.config(data(runs), on_non_finite="skip", checkpoint_every_steps=1)
    straight, resumed = equal_to_undisturbed(config, objects(), step=6, train=train_here)
    assert len(resumed.resumed_steps) == 1
    assert resumed.non_finite == straight.non_finite


def test_skip_changes_nothing_where_all_is_finite(runs: Runs) -> None:
    manifest = data(runs, bad=False)
    results = [
        runs.here(manifest, objects(), on_non_finite=policy, max_grad_norm=0.5) for policy in ("stop", "skip")
    ]
    assert_equal_states(*results)
    assert [result.non_finite for result in results] == [(), ()]


def test_a_gradient_alone_is_enough_to_skip(runs: Runs) -> None:
    columns = columns_of(64)
    columns["y"] = np.where(np.arange(64) == BAD_ROW, 7.0, 1.0).astype(np.float32)
    changes = {"on_non_finite": "skip", "losses": ("custom",), "epochs": 1}
    result = runs.here(runs.shards(columns, num_files=1), objects(losses=(root_loss,)), **changes)
    assert result.non_finite == (NonFiniteStep(epoch=1, step=3, ranks=(), action="skipped"),)
    assert "step 3: the summed gradients are not finite" in str(result.non_finite[0])
    assert is_finite(result)


def test_rollback_goes_back_with_half_the_rate(runs: Runs) -> None:
    # The sixth pass fails, and again in the next attempt.
    changes = {"on_non_finite": "rollback", "checkpoint_every_steps": 4}
    result = runs.here(data(runs, bad=False), objects(bursts=2), **changes)
    assert [(found.epoch, found.step, found.action) for found in result.non_finite] == [
        (2, 1, "rolled back"),
        (1, 5, "rolled back"),
    ]
    assert (result.steps, [record.epoch for record in result.history]) == (10, [1, 2])
    assert result.history[0].learning_rate == result.history[1].learning_rate == 0.01 / 4
    assert read_history(result.run_uri) == list(result.history)
    assert is_finite(result)


class Logs(Callback):
    def on_step_end(self, state: TrainingState) -> None:
        state.log("step", state.step)


def test_rollback_takes_logged_values_back(runs: Runs) -> None:
    changes = {"on_non_finite": "rollback", "checkpoint_every_steps": 100, "batch_size": 8}
    result = runs.here(data(runs, bad=False), objects(bursts=1, callbacks=(Logs(),)), **changes)
    assert [found.action for found in result.non_finite] == ["rolled back"]
    assert [record.metrics["step_rank0"] for record in result.history] == [5.5, 15.5]


@pytest.mark.parametrize("optimizer", ["adamw", "adagrad"])
def test_rollback_to_the_first_weights_takes_optimizer_state_back_too(runs: Runs, optimizer: str) -> None:
    """Before its first step, an optimizer has no state, or only the state from its constructor."""
    settings = {"optimizer": optimizer, "checkpoint_every_steps": 100}
    manifest = data(runs, bad=False)
    result = runs.here(manifest, objects(bursts=1), on_non_finite="rollback", **settings)
    assert [found.action for found in result.non_finite] == ["rolled back"]
    assert_equal_states(result, runs.here(manifest, objects(), learning_rate=0.01 / 2, **settings))


def test_rollback_ends_where_it_does_not_help(runs: Runs) -> None:
    message = r"epoch 1, step 3: the loss of rank 0 .* 5 rollbacks to step 2, .* did not help; lower"
    with pytest.raises(FloatingPointError, match=message):
        runs.here(data(runs), objects(), on_non_finite="rollback", checkpoint_every_steps=2)


def infinite_loss(output: torch.Tensor, label: torch.Tensor) -> torch.Tensor:
    """Is infinite at label 7, without a gradient there."""
    return torch.where(label == 7.0, math.inf, (output[:, 0] - label).square())


@pytest.mark.distributed
@pytest.mark.parametrize("sharding", ["none", pytest.param("gradients", marks=pytest.mark.slow)])
def test_ranks_skip_what_one_rank_skips_and_report_its_loss(runs: Runs, sharding: str) -> None:
    """The bad row is its rank's only row in the step."""
    columns = columns_of(16)
    columns["y"][5] = 7.0
    own = UserObjects(losses=(infinite_loss,))
    one, two = (
        train(
            runs.shards(columns, num_files=1),
            own,
            on_non_finite="skip",
            losses=("custom",),
            batch_size=2,
            model=ModelSpec("linear", {"in_features": 4, "out_features": 1}),
            sync=sync_of(sharding=sharding),
        )
        for train in (runs.here, runs.gang)
    )
    for result in (one, two):
        assert [(found.epoch, found.step) for found in result.non_finite] == [(1, 3), (2, 3)]
    assert_equal_histories(one, two)


CASES: dict[str, dict[str, Any]] = {
    "plain": {"max_grad_norm": 1.0},
    "accumulation": {"gradient_accumulation": 2},
    "optimizer": {"sync": Zero(stage=1), "max_grad_norm": 1.0},
    "gradients": {"sync": Zero(stage=2)},
    "parameters": {"sync": Zero(stage=3)},
}


def test_two_ranks_decide_together(runs: Runs, collective: str) -> None:
    bad, gang = data(runs), {"num_workers": 2, "collective": collective}
    trainings = {
        name: (runs.config(bad, on_non_finite="skip", **gang, **changes), objects())
        for name, changes in CASES.items()
        if (name, collective) != ("parameters", "horovod")
    }
    rollback = {"on_non_finite": "rollback", "checkpoint_every_steps": 4}
    trainings["rollback"] = runs.config(data(runs, bad=False), **rollback, **gang), objects(bursts=1)
    firsts, seconds = train_on_one_gang(trainings)
    for name, first in firsts.items():
        assert first.non_finite == seconds[name].non_finite, name
        assert is_finite(first), name
        if name == "rollback":
            assert [found.action for found in first.non_finite] == ["rolled back"]
            assert first.history[-1].learning_rate == 0.005
            continue
        assert [(found.epoch, found.step) for found in first.non_finite] == [(1, 3), (2, 3)], name
        # One bad row, so one rank has a bad loss.
        assert {len(found.ranks) for found in first.non_finite} == {1}, name
        assert [record.skipped_steps for record in first.history] == [1, 1], name
    with pytest.raises(WorkerError, match=r"not finite in epoch 1, step 3 on rank [01]; lower"):
        runs.gang(bad, objects(), max_grad_norm=1.0, collective=collective)
