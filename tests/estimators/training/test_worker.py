"""`train_worker` on one rank and on several: the numbers, not the launch."""

from __future__ import annotations

import json
import random
import threading
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from ranks import GANGS, TORCH_AND_SLOW_OTHERS
from small_training import config_of, train_gang, weights_of
from torch import nn

from ringspark.estimators import WorkerError
from ringspark.estimators.launch.local import train_here
from ringspark.estimators.training.callbacks import Callback, TrainingState
from ringspark.estimators.training.check.probe import PROBE_ROWS
from ringspark.estimators.training.checkpoint.weights import load_checkpoint
from ringspark.estimators.training.history import read_history, read_progress
from ringspark.estimators.training.settings.config import UserObjects
from ringspark.estimators.training.worker import TrainResult
from ringspark.models import ModelSpec
from ringspark.pipelines import ShardManifest

SPEC = ModelSpec("mlp", {"in_features": 4, "hidden": [16, 16], "out_features": 1})
MakeShards = Callable[..., ShardManifest]
_config = partial(config_of, model=SPEC.to_json())
_weights = partial(weights_of, module=SPEC.build())


def _columns(rows: int, seed: int = 0) -> dict[str, np.ndarray]:
    rng = np.random.default_rng(seed)
    features = rng.normal(size=(rows, 4)).astype(np.float32)
    label = (features.sum(1) + rng.normal(size=rows) * 0.1).astype(np.float32)
    return {"x": features, "y": label, "w": rng.integers(0, 3, size=rows).astype(np.float64)}


@pytest.mark.distributed
@pytest.mark.parametrize("collective", GANGS)
def test_two_workers_equal_one_on_the_same_global_batches(
    make_shards: MakeShards, tmp_path: Path, collective: str
) -> None:
    manifest = make_shards(_columns(803))
    # 26 steps per epoch, 52 in total; the last batch of an epoch is short.
    one = train_here(_config(manifest, tmp_path / "one"))
    two = train_gang(_config(manifest, tmp_path / "two", num_workers=2, collective=collective))
    assert one.steps == two.steps == 52
    assert (_weights(one) - _weights(two)).abs().max() < 1e-5
    losses = [[record.train_loss for record in result.history] for result in (one, two)]
    assert losses[0] == pytest.approx(losses[1], rel=1e-5)


@pytest.mark.distributed
@pytest.mark.parametrize("collective", GANGS)
def test_a_rank_without_rows_in_a_step_does_not_change_the_numbers(
    make_shards: MakeShards, tmp_path: Path, collective: str
) -> None:
    """65 rows in batches of 32: the third batch has one row, so only one rank has rows."""
    manifest = make_shards(_columns(65), row_group_rows=40, num_files=1)
    one = train_here(_config(manifest, tmp_path / "one"))
    three = train_gang(_config(manifest, tmp_path / "three", num_workers=3, collective=collective))
    assert one.steps == three.steps == 6
    assert (_weights(one) - _weights(three)).abs().max() < 1e-5


class _Logarithm(nn.Module):
    """Has no finite gradient at zero, and a parameter that only training uses."""

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.extra = nn.Linear(4, 1), nn.Linear(4, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x.abs().log()
        output = self.linear(x)
        return output + self.extra(x) if self.training else output  # type: ignore[no-any-return]


@pytest.mark.distributed
@pytest.mark.parametrize("collective", TORCH_AND_SLOW_OTHERS)
def test_a_rank_without_rows_adds_exactly_nothing(
    make_shards: MakeShards, tmp_path: Path, collective: str
) -> None:
    manifest = make_shards(_columns(33))
    changes: dict[str, Any] = {"model": None, "epochs": 1}
    one = train_here(_config(manifest, tmp_path / "a", **changes), UserObjects(module=_seeded()))
    config = _config(manifest, tmp_path / "b", num_workers=2, collective=collective, **changes)
    two = train_gang(config, UserObjects(module=_seeded()))
    assert (weights_of(one, _Logarithm()) - weights_of(two, _Logarithm())).abs().max() < 1e-5


def _seeded() -> nn.Module:
    torch.manual_seed(0)
    return _Logarithm()


@pytest.mark.distributed
@pytest.mark.parametrize("collective", TORCH_AND_SLOW_OTHERS)
def test_row_weights_count_over_the_global_batch(
    make_shards: MakeShards, tmp_path: Path, collective: str
) -> None:
    manifest = make_shards(_columns(200))
    one = train_here(_config(manifest, tmp_path / "one", weight_column="w"))
    two = train_gang(
        _config(manifest, tmp_path / "two", weight_column="w", num_workers=2, collective=collective)
    )
    unweighted = train_here(_config(manifest, tmp_path / "plain"))
    assert (_weights(one) - _weights(two)).abs().max() < 1e-5
    assert (_weights(one) - _weights(unweighted)).abs().max() > 1e-3


def test_integer_weights_equal_repeated_rows(make_shards: MakeShards, tmp_path: Path) -> None:
    columns = _columns(100)
    counts = columns["w"].astype(int)
    repeated = {name: np.repeat(values, counts, axis=0) for name, values in columns.items()}
    changes: dict[str, Any] = {"batch_size": 400, "epochs": 10}
    weighted = train_here(
        _config(make_shards(columns, name="a"), tmp_path / "one", weight_column="w", **changes)
    )
    plain = train_here(_config(make_shards(repeated, name="b"), tmp_path / "two", **changes))
    assert (_weights(weighted) - _weights(plain)).abs().max() < 1e-5


@pytest.mark.distributed
@pytest.mark.parametrize("collective", TORCH_AND_SLOW_OTHERS)
def test_two_runs_with_one_seed_are_bitwise_equal(
    make_shards: MakeShards, tmp_path: Path, collective: str
) -> None:
    manifest = make_shards(_columns(300))
    spec = ModelSpec("mlp", {"in_features": 4, "hidden": [8], "out_features": 1, "dropout": 0.3})
    config = _config(manifest, tmp_path / "a", num_workers=2, collective=collective, model=spec.to_json())
    first, second = train_gang(config), train_gang(replace(config, run_uri=str(tmp_path / "b")))
    other = train_gang(replace(config, run_uri=str(tmp_path / "c"), seed=1))
    weights = [weights_of(result, spec.build()) for result in (first, second, other)]
    assert weights[0].equal(weights[1])
    assert not weights[0].equal(weights[2])


@pytest.mark.parametrize("accumulation", [2, 3])
def test_micro_batches_give_the_step_of_the_whole_batch(
    make_shards: MakeShards, tmp_path: Path, accumulation: int
) -> None:
    manifest = make_shards(_columns(200))
    whole = train_here(_config(manifest, tmp_path / "a"))
    parts = train_here(_config(manifest, tmp_path / "b", gradient_accumulation=accumulation))
    assert (_weights(whole) - _weights(parts)).abs().max() < 1e-5


@pytest.mark.distributed
@pytest.mark.parametrize("collective", TORCH_AND_SLOW_OTHERS)
def test_micro_batches_on_two_workers(make_shards: MakeShards, tmp_path: Path, collective: str) -> None:
    manifest = make_shards(_columns(197))
    whole = train_here(_config(manifest, tmp_path / "a", max_grad_norm=0.1))
    config = _config(manifest, tmp_path / "b", gradient_accumulation=2, num_workers=2, max_grad_norm=0.1)
    assert (_weights(whole) - _weights(train_gang(replace(config, collective=collective)))).abs().max() < 1e-5


@pytest.mark.parametrize("precision", ["bf16", "fp16"])
def test_mixed_precision_learns_like_fp32_and_keeps_fp32_weights(
    make_shards: MakeShards, tmp_path: Path, precision: str
) -> None:
    manifest = make_shards(_columns(400))
    full = train_here(_config(manifest, tmp_path / "a", epochs=5))
    mixed = train_here(_config(manifest, tmp_path / "b", epochs=5, precision=precision))
    assert _weights(mixed).dtype == torch.float32
    assert not _weights(full).equal(_weights(mixed))
    assert mixed.history[-1].train_loss == pytest.approx(full.history[-1].train_loss, rel=0.2)
    assert mixed.history[-1].train_loss < 0.5 * mixed.history[0].train_loss


class _Recorder(nn.Module):
    """Records its training rows in order."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(1, 1)
        self.seen: list[float] = []

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.training:
            self.seen.extend(x.tolist())
        return self.linear(x[:, None])  # type: ignore[no-any-return]


@pytest.mark.parametrize("shuffle", [True, False])
def test_shuffle_is_obeyed_and_every_row_is_seen_once(
    make_shards: MakeShards, tmp_path: Path, shuffle: bool, monkeypatch: Any
) -> None:
    rows = np.arange(100, dtype=np.float32)
    manifest = make_shards({"x": rows, "y": rows}, row_group_rows=16, num_files=1)
    recorder = _Recorder()
    monkeypatch.setattr(
        "ringspark.estimators.training.rank_network.build_module", lambda config, objects: recorder
    )
    config = _config(manifest, tmp_path / "a", model=None, epochs=1, shuffle=shuffle, learning_rate=1e-6)
    train_here(config, UserObjects(module=recorder))
    assert sorted(recorder.seen) == rows.tolist()
    assert (recorder.seen == rows.tolist()) is not shuffle


def test_validation_rows_are_measured_and_never_trained_on(make_shards: MakeShards, tmp_path: Path) -> None:
    columns = _columns(200)
    held_out = np.arange(200) % 4 == 0
    kept = {name: values[~held_out] for name, values in columns.items()}
    with_split = train_here(
        _config(make_shards(columns, validation=held_out, name="a"), tmp_path / "a", shuffle=False)
    )
    assert with_split.rows == 2 * 150
    module = SPEC.build()
    load_checkpoint(with_split.checkpoint_uri, module)
    with torch.no_grad():
        output = module.eval()(torch.from_numpy(columns["x"][held_out]))[:, 0]
    expected = ((output - torch.from_numpy(columns["y"][held_out])) ** 2).mean().item()
    assert with_split.history[-1].validation_loss == pytest.approx(expected, rel=1e-5)
    without = train_here(_config(make_shards(kept, name="b"), tmp_path / "b", shuffle=False))
    assert without.history[-1].validation_loss is None


def test_the_run_directory_tells_the_story(make_shards: MakeShards, tmp_path: Path) -> None:
    result = train_here(_config(make_shards(_columns(100)), tmp_path / "run"))
    history = read_history(result.run_uri)
    assert tuple(history) == result.history
    assert [record.epoch for record in history] == [1, 2]
    assert history[0].rows == 100
    assert history[0].steps == 4
    progress = read_progress(result.run_uri)
    assert progress is not None
    assert progress.num_steps == 8


def test_training_changes_neither_the_users_module_nor_the_random_state(
    make_shards: MakeShards, tmp_path: Path
) -> None:
    module = SPEC.build()
    before = [p.clone() for p in module.parameters()]
    state, others = torch.get_rng_state(), (random.getstate(), str(np.random.get_state()))
    result = train_here(
        _config(make_shards(_columns(100)), tmp_path / "run", model=None), UserObjects(module=module)
    )
    assert torch.get_rng_state().equal(state)
    assert (random.getstate(), str(np.random.get_state())) == others
    assert all(a.equal(b) for a, b in zip(before, module.parameters(), strict=True))
    assert not _weights(result).equal(torch.cat([p.flatten() for p in before]))


class _Draws(Callback):
    """Draws a number from each random generator, on every rank."""

    def __init__(self, folder: Path) -> None:
        self.folder = str(folder)

    def on_train_start(self, state: TrainingState) -> None:
        drawn = [torch.rand(1).item(), np.random.random(), random.random()]
        Path(self.folder, str(state.rank)).write_text(json.dumps(drawn))


@pytest.mark.distributed
def test_every_rank_draws_from_streams_of_its_own_that_the_seed_decides(
    make_shards: MakeShards, tmp_path: Path
) -> None:
    manifest = make_shards(_columns(65))
    drawn = {}
    for name, seed in (("first", 5), ("again", 5), ("other", 6)):
        folder = tmp_path / name
        folder.mkdir()
        config = _config(manifest, folder / "run", epochs=1, num_workers=2, collective="torch", seed=seed)
        train_gang(config, UserObjects(callbacks=(_Draws(folder),)))
        drawn[name] = [json.loads((folder / str(rank)).read_text()) for rank in range(2)]
    assert drawn["first"] == drawn["again"]
    numbers = [number for name in ("first", "other") for rank in drawn[name] for number in rank]
    assert len(set(numbers)) == 12


class _BreaksInValidation(nn.Module):
    """Fails on the second batch of held-out rows."""

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.calls = nn.Linear(4, 1), 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if not self.training and len(x) > PROBE_ROWS:
            self.calls += 1
            if self.calls == 2:
                raise RuntimeError("the held-out rows broke")
        return self.linear(x)  # type: ignore[no-any-return]


def test_an_error_in_a_validation_ends_its_reader(
    make_shards: MakeShards, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Many blocks, so that the reader is still running ahead.
    monkeypatch.setattr("ringspark.pipelines.readers.base._BLOCK_ROWS", 32)
    manifest = make_shards(_columns(1000), validation=np.arange(1000) >= 40)
    before = set(threading.enumerate())
    with pytest.raises(RuntimeError, match="the held-out rows broke") as raised:
        train_here(_config(manifest, tmp_path / "run", model=None), UserObjects(module=_BreaksInValidation()))
    # The error keeps the frames of the training and everything in them.
    assert raised.value is not None
    assert set(threading.enumerate()) == before


class _Shared(list[float]):
    """Is not copied for a training in this process."""

    belongs_to_rank = True


def test_a_users_optimizer_with_two_groups_and_schedule_is_used(
    make_shards: MakeShards, tmp_path: Path
) -> None:
    frozen_rate = _Shared()

    def optimizer(parameters: Any) -> torch.optim.Optimizer:
        first, *others = list(parameters)
        return torch.optim.SGD([{"params": [first], "lr": 0.0}, {"params": others, "lr": 0.05}])

    def schedule(step: int, num_steps: int) -> float:
        frozen_rate.append(step / num_steps)
        return 0.5

    result = train_here(
        _config(make_shards(_columns(100)), tmp_path / "run"),
        UserObjects(optimizer=optimizer, lr_schedule=schedule),
    )
    module = SPEC.build()
    load_checkpoint(result.checkpoint_uri, module)
    torch.manual_seed(0)
    start = SPEC.build()
    first, second = list(module.parameters())[:2], list(start.parameters())[:2]
    assert first[0].equal(second[0])
    assert not first[1].equal(second[1])
    # The driver tries the whole schedule before the training.
    assert frozen_rate[: result.steps] == frozen_rate[result.steps :]


class _FailsAtStep(nn.Module):
    def __init__(self, step: int) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 1)
        self.step, self.calls = step, 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.training and torch.is_grad_enabled():
            self.calls += 1
            if (
                self.calls == self.step
                and torch.distributed.is_initialized()
                and torch.distributed.get_rank() == 1
            ):
                raise RuntimeError("the model broke")
        return self.linear(x)  # type: ignore[no-any-return]


@pytest.mark.distributed
def test_a_model_that_raises_on_one_rank_is_named_with_its_step(
    make_shards: MakeShards, tmp_path: Path
) -> None:
    config = _config(
        make_shards(_columns(300)), tmp_path / "run", model=None, num_workers=2, collective="torch"
    )
    with pytest.raises(
        WorkerError, match=r"rank 1 .* 'training, epoch 1, step 3': RuntimeError: the model broke"
    ):
        train_gang(config, UserObjects(module=_FailsAtStep(3)))


@pytest.mark.extras
@pytest.mark.parametrize("compression", ["none", "int8"])
def test_a_loss_that_is_not_finite_stops_the_training(
    make_shards: MakeShards, tmp_path: Path, compression: str
) -> None:
    config = _config(
        make_shards(_columns(100)),
        tmp_path / "run",
        optimizer="sgd",
        learning_rate=1e20,
        activation_compression=compression,
    )
    with pytest.raises(FloatingPointError, match=r"the training loss is .* lower learningRate") as raised:
        train_here(config)
    assert ("activationCompression='int8' rounds" in str(raised.value)) == (compression == "int8")


def test_the_result_survives_json(make_shards: MakeShards, tmp_path: Path) -> None:
    result = train_here(_config(make_shards(_columns(50)), tmp_path / "run"))
    text = result.to_json()
    assert TrainResult.from_json(text) == result
    assert len(json.dumps(text)) < 4096
