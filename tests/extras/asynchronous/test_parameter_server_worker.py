"""`train_worker` with a parameter server: equality with synchronous training, checkpoints, slow workers."""

import math
import time
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from acting_callback import Acts, add_to_weights
from parity import difference
from safetensors.torch import load_file
from short_sync import sync_of
from small_training import columns_of, config_of, train_gang, train_ranks, weights_of
from torch import nn

from ringspark.estimators import WorkerError
from ringspark.estimators.training.callbacks import TrainingState
from ringspark.estimators.training.settings.config import TrainConfig, UserObjects
from ringspark.estimators.training.step_log import read_steps
from ringspark.models import ModelSpec

SPEC = ModelSpec("mlp", {"in_features": 4, "hidden": [16], "out_features": 1, "dropout": 0.0})
MakeConfig = Callable[..., TrainConfig]
IN_STEP = {"name": "ssp", "staleness": 0, "correction": "none"}
APART: dict[str, dict[str, Any]] = {
    "ssp": {"name": "ssp", "staleness": 2, "correction": "none"},
    "asp": {"name": "asp", "correction": "staleness"},
    "hogwild": {"name": "hogwild"},
}
pytestmark = pytest.mark.distributed


@pytest.fixture
def config(make_shards: Any, tmp_path: Path) -> MakeConfig:
    weight = np.random.default_rng(0).uniform(0.5, 2.0, size=260).astype(np.float32)
    manifest = make_shards(columns_of(260) | {"w": weight}, validation=np.arange(260) >= 225)
    return partial(config_of, manifest, tmp_path / "run", model=SPEC, num_workers=2, collective="torch")


@pytest.fixture
def zeros(make_shards: Any) -> Callable[[int], dict[str, Any]]:
    """Returns a function that returns settings of SGD with a rate of 1 on that many rows of zeros."""

    def settings(rows: int) -> dict[str, Any]:
        columns = {"x": np.zeros((rows, 4), np.float32), "y": np.zeros(rows, np.float32)}
        shards = make_shards(columns, name="zeros").uri
        return {"shards_uri": shards, "model": None, "optimizer": "sgd", "learning_rate": 1.0}

    return settings


@torch.no_grad()
def _shrink(state: TrainingState) -> None:
    for parameter in state.module.parameters():
        parameter.mul_(0.9).clamp_(-0.3, 0.3)


SHRINKS = Acts(step_end=_shrink, epoch_end=_shrink)


@pytest.mark.parametrize("callbacks", [(), (SHRINKS,)], ids=["plain", "changed by a callback"])
def test_staleness_0_is_the_training_by_all_reduce_to_the_bit(config: MakeConfig, callbacks: Any) -> None:
    """Covers weighted rows, a schedule, and a last batch of one row, so that one rank has none."""
    plain = config(optimizer="momentum", lr_schedule="cosine", weight_column="w")
    served = replace(plain, run_uri=f"{plain.run_uri}-served", sync=sync_of(apart=IN_STEP))
    one, other = (train_gang(each, UserObjects(callbacks=callbacks)) for each in (plain, served))
    assert difference(one, other, plain) == 0
    assert one.history[-1].validation_loss == other.history[-1].validation_loss


class _Constant(nn.Module):
    """Its gradient is always 1, and rank 0 takes long to serve the weights."""

    def __init__(self, size: int = 1) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(size))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.weight.sum() * torch.ones_like(x[:, :1])

    def _save_to_state_dict(self, *args: Any) -> None:
        super()._save_to_state_dict(*args)
        # The driver calls it too, outside a gang.
        if torch.distributed.is_initialized() and torch.distributed.get_rank() == 0:
            time.sleep(0.3)


def _output(output: torch.Tensor, label: torch.Tensor) -> torch.Tensor:
    return output[:, 0]


# Adds a different number to the weights at each event. Step 4 is the last one of the epoch.
ADDS = Acts(
    train_start=lambda state: add_to_weights(state, 10_000),
    step_end=lambda state: add_to_weights(state, {3: 100, 4: 200}.get(state.step, 0)),
    epoch_end=lambda state: add_to_weights(state, 1_000),
)


@pytest.mark.parametrize("name", ["ssp", "asp"])
def test_ranks_apart_keep_what_a_callback_does_to_the_weights(config: Any, zeros: Any, name: str) -> None:
    sync, objects = sync_of(apart=APART[name] | {"correction": "none"}), {"callbacks": (ADDS,)}
    objects |= {"module": _Constant(4), "losses": (_output,)}
    result = train_gang(config(sync=sync, **zeros(128)), UserObjects(**objects))
    # Each rank serves a shard of the four weights. 8 steps move each weight by 1.
    assert weights_of(result, _Constant(4)).tolist() == [10_000 + 100 + 200 + 2 * 1_000 - 8] * 4


@pytest.mark.parametrize("name", [pytest.param("asp", marks=pytest.mark.slow), "hogwild"])
def test_a_checkpoint_has_only_the_steps_before_it(config: Any, zeros: Any, tmp_path: Any, name: str) -> None:
    """With a rate of 1, a weight is the number of steps. A worker that trains on must wait for the copy."""
    sync = sync_of(apart=APART[name] | ({} if name == "hogwild" else {"correction": "none"}))
    made = config(sync=sync, checkpoint_every_steps=3, keep_checkpoints=9, **zeros(256))
    train_gang(made, UserObjects(module=_Constant(), losses=(_output,)))
    steps = {}
    for folder in sorted((tmp_path / "run" / "checkpoints").iterdir()):
        steps[int(folder.name[-10:])] = -load_file(folder / "model.safetensors")["weight"].item()
    assert list(steps) == [3, 6, 9, 12, 15]
    for step, found in steps.items():
        # Two concurrent writes may lose an update, but no update comes too early.
        assert found <= step
        assert name == "hogwild" or found == step


def test_a_rank_without_rows_records_no_loss(config: MakeConfig) -> None:
    """In some batches of two rows, both rows go to rank 1."""
    made = config(sync=sync_of(apart=APART["asp"]), batch_size=2, log_every_steps=1)
    result = train_gang(made)
    records = read_steps(made.run_uri)
    assert not any(math.isnan(record.train_loss) for record in records)
    assert result.steps // 2 < len(records) < result.steps


class _Spoiled:
    """The third batch of rank 1 is not finite. Rank 0 is slow, and rank 2 slower."""

    def __init__(self) -> None:
        self.calls = 0

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        if not torch.distributed.is_initialized():
            return x
        rank = torch.distributed.get_rank()
        self.calls += 1
        time.sleep((0.3, 0.0, 3.0)[rank])
        return x * float("nan") if (rank, self.calls) == (1, 3) else x


@pytest.mark.slow
def test_a_rank_that_waits_is_blamed_for_its_own_loss(config: MakeConfig) -> None:
    with pytest.raises(WorkerError, match="is not finite in epoch 1, step 3 on rank 1;"):
        train_gang(
            config(sync=sync_of(apart=APART["ssp"]), num_workers=3), UserObjects(transform_batch=_Spoiled())
        )


class _SlowOnRankOne:
    """Sleeps on one rank. It gets the rank from the process group, because it is only passed the step."""

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        # The driver calls it too, outside a gang.
        if torch.distributed.is_initialized() and torch.distributed.get_rank() == 1:
            time.sleep(0.03)
        return x


@pytest.mark.parametrize("name", ["ssp", pytest.param("asp", marks=pytest.mark.slow), "hogwild"])
def test_workers_of_unequal_speed_learn_and_end_with_one_model(config: MakeConfig, name: str) -> None:
    settings = {"weight_column": "w", "epochs": 4, "learning_rate": 0.1, "keep": "best"}
    every = {"log_every_steps": 3, "checkpoint_every_steps": 5}
    made = config(sync=sync_of(apart=APART[name]), **settings, **every)
    first, second = train_ranks(made, UserObjects(transform_batch=_SlowOnRankOne()))
    losses = [epoch.train_loss for epoch in first.history]
    assert losses[-1] < 0.3 * losses[0]
    # The validation uses the weights on which all ranks have agreed.
    assert [e.validation_loss for e in first.history] == [e.validation_loss for e in second.history]
    assert not first.checkpoint_errors
    # Rank 0's losses, at its own speed.
    assert [record.step for record in read_steps(made.run_uri)] == list(range(3, first.steps + 1, 3))


@pytest.mark.slow
@pytest.mark.parametrize("name", APART)
def test_a_training_goes_on_from_its_checkpoint(config: MakeConfig, name: str) -> None:
    """This includes another number of workers, because no rank has state that the checkpoint lacks."""
    settings = {"optimizer": "momentum", "epochs": 4, "checkpoint_every_epochs": 1}
    made = config(sync=sync_of(apart=APART[name]), pause_after=2, **settings)
    before = train_gang(made)
    after = train_gang(replace(made, pause_after=None, num_workers=3))
    assert after.resumed_steps == (before.steps,)
    assert after.steps == 2 * before.steps
    assert after.history[:2] == before.history
    assert after.history[2].train_loss < before.history[0].train_loss
