"""Fine-tuning: frozen parameters, LoRA adapters, and the moving average of weights."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from short_sync import sync_of
from small_training import config_of, train_gang
from torch import nn

from ringspark.estimators.launch.local import train_here
from ringspark.estimators.stages.held_weights import HeldWeights
from ringspark.estimators.training.callbacks import Callback, TrainingState
from ringspark.estimators.training.check.driver import check_training
from ringspark.estimators.training.checkpoint.reading import verify
from ringspark.estimators.training.checkpoint.weights import read_adapter
from ringspark.estimators.training.finetuning.freezing import tune
from ringspark.estimators.training.settings.config import UserObjects
from ringspark.estimators.training.worker import TrainResult
from ringspark.models import ModelSpec
from ringspark.pipelines import ShardManifest

MakeShards = Callable[..., ShardManifest]
SPEC = ModelSpec("mlp", {"in_features": 4, "hidden": [16, 16], "out_features": 1})
BODY = "trunk.*"
LORA = {"rank": 2, "alpha": 4.0, "targets": ["trunk.*"], "dropout": 0.0, "train": ["head.*"]}
TUNINGS: dict[str, dict[str, Any]] = {
    "freeze": {"freeze": (BODY,)},
    "lora": {"lora": LORA},
    "average": {"ema_decay": 0.8},
    "all": {"lora": LORA, "ema_decay": 0.8, "gradient_checkpointing": "all"},
}
SHARDINGS = [
    ("none", "horovod"),
    ("optimizer", "torch"),
    ("gradients", "torch"),
    ("parameters", "torch"),
]


pytestmark = pytest.mark.usefixtures("one_thread")


_config = partial(config_of, model=SPEC.to_json())


def _columns(rows: int = 100) -> dict[str, np.ndarray]:
    rng = np.random.default_rng(0)
    features = rng.normal(size=(rows, 4)).astype(np.float32)
    return {"x": features, "y": features.sum(1)}


def _state(result: TrainResult) -> dict[str, torch.Tensor]:
    return load_file(Path(result.checkpoint_uri) / "model.safetensors")


def _distance(one: TrainResult, two: TrainResult) -> float:
    first, second = _state(one), _state(two)
    assert first.keys() == second.keys()
    return max(float((first[name] - second[name]).abs().max()) for name in first)


class Sees(Callback):
    """Records optimizer state and gradients after the first step; raises after step `at`."""

    belongs_to_rank = True  # is not copied for a training in this process

    def __init__(self, at: int | None = None) -> None:
        self.at = at
        self.elements = self.gradients = 0
        self.first: dict[str, torch.Tensor] = {}

    def on_train_start(self, state: TrainingState) -> None:
        self.first = {name: tensor.clone() for name, tensor in state.module.state_dict().items()}

    def on_step_end(self, state: TrainingState) -> None:
        states = [t for s in state.optimizer.state.values() for t in s.values() if t.dim()]
        self.elements = sum(t.numel() for t in states)
        self.gradients = sum(p.grad.numel() for p in state.module.parameters() if p.grad is not None)
        if state.step == self.at:
            raise RuntimeError("stopped")


def test_frozen_parameters_stay_and_cost_nothing(make_shards: MakeShards, tmp_path: Path) -> None:
    sees = Sees()
    result = train_here(
        _config(make_shards(_columns()), tmp_path / "r", freeze=(BODY,)), UserObjects(callbacks=(sees,))
    )
    state = _state(result)
    moved = {name for name in state if not torch.equal(state[name], sees.first[name])}
    assert moved == {"head.weight", "head.bias"}
    assert sees.gradients == 17
    assert sees.elements == 2 * 17  # AdamW's two moments


@pytest.mark.distributed
@pytest.mark.slow
@pytest.mark.parametrize(("sharding", "collective"), SHARDINGS[:3])
def test_the_ranks_exchange_nothing_for_frozen_parameters(
    make_shards: MakeShards, tmp_path: Path, sharding: str, collective: str
) -> None:
    """A step sends only the gradients of the head, with or without a frozen body."""
    manifest = make_shards(_columns())
    head = ModelSpec("linear", {"in_features": 4, "out_features": 1})

    def bytes_of_a_step(**changes: Any) -> float:
        sent = [
            train_gang(
                _config(
                    manifest,
                    tmp_path / f"{epochs}{changes.get('freeze', '')}".replace("*", ""),
                    num_workers=2,
                    sync=sync_of(sharding=sharding),
                    collective=collective,
                    epochs=epochs,
                    **changes,
                )
            )
            for epochs in (1, 3)
        ]
        return (sent[1].bytes_sent - sent[0].bytes_sent) / (sent[1].steps - sent[0].steps)

    wide = ModelSpec("mlp", {"in_features": 4, "hidden": [64, 4], "out_features": 1})
    assert bytes_of_a_step(model=wide.to_json(), freeze=(BODY,)) == bytes_of_a_step(model=head.to_json())


class _Normed(nn.Module):
    """A body with batch normalization, and a head."""

    def __init__(self, affine: bool = True) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Linear(4, 3), nn.BatchNorm1d(3, affine=affine))
        self.head = nn.Linear(3, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.body(x))  # type: ignore[no-any-return]


@pytest.mark.parametrize("affine", [True, False])
def test_a_frozen_batch_normalisation_keeps_its_statistics_and_normalises_by_them(
    make_shards: MakeShards, tmp_path: Path, affine: bool
) -> None:
    torch.manual_seed(0)
    module = _Normed(affine)
    norm = module.body[1]
    assert isinstance(norm, nn.BatchNorm1d)
    norm.running_mean = torch.tensor([0.1, 0.2, 0.3])
    norm.running_var = torch.tensor([1.0, 2.0, 3.0])
    columns = _columns()
    manifest = make_shards(columns)
    # One step with all rows: its recorded loss belongs to the initial weights.
    config = _config(manifest, tmp_path / "r", model=None, batch_size=100, epochs=1, freeze=("body.*",))
    result = train_here(config, UserObjects(module=module))
    module.eval()
    with torch.no_grad():
        loss = (module(torch.from_numpy(columns["x"])).squeeze(1) - torch.from_numpy(columns["y"])).square()
    assert result.history[0].train_loss == pytest.approx(float(loss.mean()), rel=1e-6)
    state = _state(result)
    for name, tensor in module.body.state_dict().items():
        assert torch.equal(state[f"body.{name}"], tensor), name
    # A partly frozen body keeps updating its running statistics.
    thawed = train_here(replace(config, freeze=("body.0.*",)), UserObjects(module=module))
    assert not torch.equal(_state(thawed)["body.1.running_mean"], state["body.1.running_mean"])


def test_a_pattern_that_matches_nothing_is_refused_with_the_nearest_name() -> None:
    with pytest.raises(ValueError, match=r"'haed.weight', which matches no parameter .*'head.weight'"):
        tune(_Normed(), freeze=["haed.weight"])
    with pytest.raises(ValueError, match="freeze leaves no parameter of model _Normed to train"):
        tune(_Normed(), freeze=["*"])


def test_an_adapter_is_trained_as_by_hand(make_shards: MakeShards, tmp_path: Path) -> None:
    """SGD over all rows in NumPy: W and the bias stay fixed, and B and A train."""
    columns = _columns()
    torch.manual_seed(0)
    module = nn.Sequential(nn.Linear(4, 1))
    weight, bias = (p.detach().double().numpy() for p in module.parameters())
    x, y = columns["x"].astype(np.float64), columns["y"].astype(np.float64)
    sees = Sees()
    config = _config(
        make_shards(columns),
        tmp_path / "r",
        model=None,
        batch_size=100,
        epochs=4,
        optimizer="sgd",
        learning_rate=0.1,
        lora={"rank": 1, "alpha": 3.0, "targets": ["0"], "dropout": 0.0, "train": []},
    )
    result = train_here(config, UserObjects(module=module, callbacks=(sees,)))
    a, b = sees.first["0.lora_A"].double().numpy(), np.zeros((1, 1))
    assert not sees.first["0.lora_B"].any()
    for _ in range(4):
        errors = x @ (weight + 3 * b @ a).T + bias - y[:, None]
        gradient = 2 * errors.T @ x / len(x)  # gradient of the full weight
        a, b = a - 0.1 * 3 * b.T @ gradient, b - 0.1 * 3 * gradient @ a.T
    state = _state(result)
    assert list(state) == ["0.bias", "0.weight"]
    assert np.allclose(state["0.weight"].numpy(), weight + 3 * b @ a, atol=1e-6)
    assert np.allclose(state["0.bias"].numpy(), bias)
    adapter = load_file(Path(result.checkpoint_uri) / "adapter.safetensors")
    assert np.allclose(adapter["0.lora_B"].numpy(), b, atol=1e-6)
    assert np.allclose(adapter["0.lora_A"].numpy(), a, atol=1e-6)


def test_an_adapter_outlives_its_folder_as_the_weights_do(make_shards: MakeShards, tmp_path: Path) -> None:
    """A pipeline may be saved over its own folder, which Spark removes first."""
    result = train_here(_config(make_shards(_columns()), tmp_path / "r", lora=LORA))
    before = read_adapter(result.checkpoint_uri)
    held = HeldWeights(result.checkpoint_uri)
    held.hold()
    shutil.rmtree(result.checkpoint_uri)
    assert held.adapter().keys() == before.keys()
    held.copy_to(str(tmp_path / "kept"))
    after = read_adapter(str(tmp_path / "kept"))
    assert before.keys() == after.keys()
    assert all(torch.equal(before[name], after[name]) for name in before)


class _Reads(nn.Module):
    """Reads the weight of its layer without calling the layer."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return nn.functional.linear(x, self.layer.weight)


def test_an_adapter_that_would_change_nothing_is_refused(make_shards: MakeShards, tmp_path: Path) -> None:
    lora = {"rank": 1, "alpha": 1, "targets": ["layer"], "dropout": 0.0, "train": []}
    manifest = make_shards(_columns())
    config = _config(manifest, tmp_path / "r", model=None, lora=lora)
    with pytest.raises(ValueError, match="'layer', which the forward of model _Reads does not call"):
        check_training(config, UserObjects(module=_Reads()), manifest)


class _Twice(nn.Module):
    """Calls its layer, and also reads the weight directly."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layer(x) + nn.functional.linear(x, self.layer.weight)  # type: ignore[no-any-return]


def test_an_adapter_that_a_merge_would_change_is_refused(make_shards: MakeShards, tmp_path: Path) -> None:
    lora = {"rank": 1, "alpha": 1, "targets": ["layer"], "dropout": 0.0, "train": []}
    manifest = make_shards(_columns())
    config = _config(manifest, tmp_path / "r", model=None, lora=lora)
    with pytest.raises(ValueError, match=r"model _Twice gives other outputs once .* are merged"):
        check_training(config, UserObjects(module=_Twice()), manifest)


class _OwnLora(nn.Linear):
    """User-defined layer with low-rank matrices."""

    def __init__(self) -> None:
        super().__init__(4, 1)
        self.lora_A, self.lora_B = nn.Parameter(torch.ones(2, 4)), nn.Parameter(torch.zeros(1, 2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x) + x @ self.lora_A.T @ self.lora_B.T


def test_a_network_with_adapters_of_a_user_s_own_is_trained_and_saved(
    make_shards: MakeShards, tmp_path: Path
) -> None:
    config = _config(make_shards(_columns()), tmp_path / "r", model=None, epochs=1)
    state = _state(train_here(config, UserObjects(module=_OwnLora())))
    assert sorted(state) == ["bias", "lora_A", "lora_B", "weight"]
    assert state["lora_B"].any()


class _Saves(Callback):
    def __init__(self, path: Path) -> None:
        self.path = path

    def on_train_end(self, state: TrainingState) -> None:
        torch.save(state.module, self.path)


def test_a_callback_may_save_a_module_with_a_frozen_normalisation(
    make_shards: MakeShards, tmp_path: Path
) -> None:
    config = _config(make_shards(_columns()), tmp_path / "r", model=None, epochs=1, freeze=("body.*",))
    train_here(config, UserObjects(module=_Normed(), callbacks=(_Saves(tmp_path / "module.pt"),)))
    found = torch.load(tmp_path / "module.pt", weights_only=False).train()
    assert found.training
    assert not found.body[1].training


def test_the_average_is_that_of_sgd_by_hand(make_shards: MakeShards, tmp_path: Path) -> None:
    """Linear regression over all rows; validation and model use the average, and training steps do not."""
    columns = _columns(120)
    held_out = np.arange(120) >= 100
    torch.manual_seed(0)
    module = nn.Sequential(nn.Linear(4, 1))
    config = _config(
        make_shards(columns, validation=held_out),
        tmp_path / "r",
        model=None,
        batch_size=100,
        epochs=5,
        optimizer="sgd",
        learning_rate=0.1,
        ema_decay=0.7,
        keep="best",
        monitor="validation_loss",
    )
    sees = Sees()
    result = train_here(config, UserObjects(module=module, callbacks=(sees,)))
    weights = np.append(*(p.detach().double().numpy().ravel() for p in module.parameters()))
    x = np.c_[columns["x"].astype(np.float64), np.ones(120)]
    y = columns["y"].astype(np.float64)
    average = weights.copy()
    for record in result.history:
        weights = weights - 0.1 * 2 * x[:100].T @ (x[:100] @ weights - y[:100]) / 100
        average = 0.7 * average + 0.3 * weights
        loss = np.mean((x[100:] @ average - y[100:]) ** 2)
        assert record.validation_loss == pytest.approx(loss, rel=1e-5)
    state = _state(result)
    assert result.checkpoint_epoch == 5
    assert np.allclose(np.append(state["0.weight"].numpy(), state["0.bias"].numpy()), average, atol=1e-6)


class _Spoils(nn.Module):
    """A linear layer with a non-finite loss for a first feature above 50."""

    def __init__(self) -> None:
        super().__init__()
        self.line = nn.Linear(4, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        bad = (x[:, :1] > 50).any() if self.training else torch.tensor(False)
        return self.line(x) * torch.where(bad, torch.nan, 1.0)  # type: ignore[no-any-return]


def test_a_step_that_is_skipped_leaves_the_average_alone(make_shards: MakeShards, tmp_path: Path) -> None:
    """Training without the skipped rows gives a bit-identical average."""
    columns = _columns(96)
    columns["x"][40, 0] = 99.0
    changes: dict[str, Any] = {"model": None, "shuffle": False, "epochs": 1, "num_workers": 1}
    module = _Spoils()
    spoiled = make_shards(columns, num_files=1, row_group_rows=32, name="a")
    config = _config(spoiled, tmp_path / "r", ema_decay=0.5, on_non_finite="skip", **changes)
    result = train_here(config, UserObjects(module=module))
    assert [step.step for step in result.non_finite] == [2]
    rest = {name: np.delete(values, slice(32, 64), axis=0) for name, values in columns.items()}
    clean = make_shards(rest, num_files=1, row_group_rows=32, name="b")
    other = train_here(_config(clean, tmp_path / "o", ema_decay=0.5, **changes), UserObjects(module=module))
    assert _distance(result, other) == 0


def test_buffers_are_not_averaged(make_shards: MakeShards, tmp_path: Path) -> None:
    torch.manual_seed(0)
    module, manifest = _Normed(), make_shards(_columns())
    runs = [
        train_here(
            _config(manifest, tmp_path / str(decay), model=None, ema_decay=decay), UserObjects(module=module)
        )
        for decay in (None, 0.9)
    ]
    plain, averaged = map(_state, runs)
    same = {name for name in plain if torch.equal(plain[name], averaged[name])}
    assert same == {f"body.1.{name}" for name in ("running_mean", "running_var", "num_batches_tracked")}


@pytest.mark.parametrize("tuning", ["lora", "average", "all"])
def test_a_training_goes_on_to_the_bit(make_shards: MakeShards, tmp_path: Path, tuning: str) -> None:
    manifest = make_shards(_columns())
    changes = TUNINGS[tuning] | {"checkpoint_every_steps": 3, "optimizer": "adamw", "epochs": 2}
    expected = train_here(_config(manifest, tmp_path / "whole", **changes))
    config = _config(manifest, tmp_path / "cut", **changes)
    with pytest.raises(RuntimeError, match="stopped"):
        train_here(config, UserObjects(callbacks=(Sees(at=5),)))
    result = train_here(config, UserObjects(callbacks=(Sees(),)))
    assert result.resumed_steps == (3,)
    assert _distance(result, expected) == 0
    records = [
        [json.loads(json.dumps(vars(r) | {"seconds": 0, "cost": None})) for r in run.history]
        for run in (result, expected)
    ]
    assert records[0] == records[1]


def test_an_average_that_is_a_link_is_no_plain_file_of_a_checkpoint(
    make_shards: MakeShards, tmp_path: Path
) -> None:
    config = _config(
        make_shards(_columns()), tmp_path / "r", ema_decay=0.8, checkpoint_every_steps=3, epochs=2
    )
    with pytest.raises(RuntimeError, match="stopped"):
        train_here(config, UserObjects(callbacks=(Sees(at=5),)))
    (folder,) = (tmp_path / "r" / "checkpoints").iterdir()
    verify(str(folder))
    average = folder / "average.safetensors"
    average.symlink_to(average.rename(tmp_path / "elsewhere"))
    with pytest.raises(ValueError, match=r"average\.safetensors is a link"):
        verify(str(folder))


def test_a_warning_says_that_the_average_will_be_of_the_first_weights(
    make_shards: MakeShards, tmp_path: Path
) -> None:
    manifest = make_shards(_columns())
    config = _config(manifest, tmp_path / "r", ema_decay=0.999)
    with pytest.warns(UserWarning, match=r"leaves 99% of the initial .* 8 steps; lower emaDecay to 0.56"):
        check_training(config, UserObjects(), manifest)


@pytest.mark.distributed
@pytest.mark.slow
@pytest.mark.parametrize("tuning", TUNINGS)
@pytest.mark.parametrize(("sharding", "collective"), SHARDINGS)
def test_two_workers_equal_one(
    make_shards: MakeShards, tmp_path: Path, tuning: str, sharding: str, collective: str
) -> None:
    """The last batch leaves a rank without rows, and the training writes a checkpoint."""
    manifest = make_shards(_columns(97), validation=np.arange(97) >= 90, row_group_rows=90)
    changes = TUNINGS[tuning] | {"keep": "best", "optimizer": "sgd", "max_grad_norm": 0.5}
    one = train_here(_config(manifest, tmp_path / "one", **changes))
    config = _config(manifest, tmp_path / "two", num_workers=2, collective=collective, **changes)
    two = train_gang(replace(config, sync=sync_of(sharding=sharding), checkpoint_every_steps=2))
    assert _distance(one, two) < 1e-6
    losses = [[record.validation_loss for record in run.history] for run in (one, two)]
    assert losses[0] == pytest.approx(losses[1], rel=1e-5)
