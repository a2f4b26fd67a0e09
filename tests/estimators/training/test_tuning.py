"""Fine-tuning: frozen parameters, LoRA adapters, and the moving average of weights."""

import shutil
from collections import OrderedDict
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from failing_callback import Fails
from parity import assert_equal_states, equal_to_undisturbed, records_of
from safetensors.torch import load_file
from short_sync import sync_of
from small_training import Runs, columns_of, state_of
from torch import nn

from ringspark.estimators.launch.local import train_here
from ringspark.estimators.stages.held_weights import HeldWeights
from ringspark.estimators.training.callbacks import Callback, TrainingState
from ringspark.estimators.training.checkpoint.reading import verify
from ringspark.estimators.training.checkpoint.weights import read_adapter
from ringspark.estimators.training.settings.config import UserObjects
from ringspark.models import ModelSpec

SPEC = ModelSpec("mlp", {"in_features": 4, "hidden": [16, 16], "out_features": 1})
SETTINGS = {"model": SPEC}
BODY = "trunk.*"
LORA = {"rank": 2, "alpha": 4.0, "targets": ["trunk.*"], "dropout": 0.0, "train": ["head.*"]}
TUNINGS: dict[str, dict[str, Any]] = {
    "freeze": {"freeze": (BODY,)},
    "lora": {"lora": LORA},
    "average": {"ema_decay": 0.8},
    "all": {"lora": LORA, "ema_decay": 0.8, "gradient_checkpointing": "all"},
}
SHARDINGS = [("none", "horovod"), *((name, "torch") for name in ("optimizer", "gradients", "parameters"))]

pytestmark = pytest.mark.usefixtures("one_thread")


class Sees(Callback):
    """Records the first weights, and the elements of optimizer state and of gradients after a step."""

    belongs_to_rank = True  # is not copied for a training in this process

    def on_train_start(self, state: TrainingState) -> None:
        self.first = {name: tensor.clone() for name, tensor in state.module.state_dict().items()}

    def on_step_end(self, state: TrainingState) -> None:
        states = [t for s in state.optimizer.state.values() for t in s.values() if t.dim()]
        self.elements = sum(t.numel() for t in states)
        self.gradients = sum(p.grad.numel() for p in state.module.parameters() if p.grad is not None)


def test_frozen_parameters_stay_and_cost_nothing(runs: Runs) -> None:
    sees = Sees()
    state = state_of(runs.here(100, UserObjects(callbacks=(sees,)), freeze=(BODY,)))
    moved = {name for name in state if not torch.equal(state[name], sees.first[name])}
    assert moved == {"head.weight", "head.bias"}
    assert sees.gradients == 17
    assert sees.elements == 2 * 17  # AdamW's two moments


@pytest.mark.distributed
@pytest.mark.slow
@pytest.mark.parametrize(("sharding", "collective"), SHARDINGS[:3])
def test_the_ranks_exchange_nothing_for_frozen_parameters(runs: Runs, sharding: str, collective: str) -> None:
    """A step sends only the gradients of the head, with or without a frozen body."""

    def bytes_of_a_step(model: ModelSpec, **changes: Any) -> float:
        changes |= {"model": model, "sync": sync_of(sharding=sharding), "collective": collective}
        short, long = (runs.gang(100, epochs=epochs, **changes) for epochs in (1, 3))
        return (long.bytes_sent - short.bytes_sent) / (long.steps - short.steps)

    head = ModelSpec("linear", {"in_features": 4, "out_features": 1})
    wide = ModelSpec("mlp", {"in_features": 4, "hidden": [64, 4], "out_features": 1})
    assert bytes_of_a_step(wide, freeze=(BODY,)) == bytes_of_a_step(head)


def _normed(affine: bool = True) -> Any:
    """Returns a body with batch normalization, and a head."""
    body = nn.Sequential(nn.Linear(4, 3), nn.BatchNorm1d(3, affine=affine))
    return nn.Sequential(OrderedDict(body=body, head=nn.Linear(3, 1)))


@pytest.mark.parametrize("affine", [True, False])
def test_a_frozen_batch_normalisation_keeps_and_uses_its_statistics(runs: Runs, affine: bool) -> None:
    module, columns = _normed(affine), columns_of(100)
    norm = module.body[1]
    assert isinstance(norm, nn.BatchNorm1d)
    norm.running_mean = torch.tensor([0.1, 0.2, 0.3])
    norm.running_var = torch.tensor([1.0, 2.0, 3.0])
    # One step with all rows: its recorded loss belongs to the initial weights.
    config = runs.config(columns, model=None, batch_size=100, epochs=1, freeze=("body.*",))
    result = train_here(config, UserObjects(module=module))
    module.eval()
    with torch.no_grad():
        loss = (module(torch.from_numpy(columns["x"])).squeeze(1) - torch.from_numpy(columns["y"])).square()
    assert result.history[0].train_loss == pytest.approx(float(loss.mean()), rel=1e-6)
    state = state_of(result)
    for name, tensor in module.body.state_dict().items():
        assert torch.equal(state[f"body.{name}"], tensor), name
    # A partly frozen body keeps updating its running statistics.
    thawed = train_here(replace(config, freeze=("body.0.*",)), UserObjects(module=module))
    assert not torch.equal(state_of(thawed)["body.1.running_mean"], state["body.1.running_mean"])


def test_an_adapter_is_trained_as_by_hand(runs: Runs) -> None:
    """SGD over all rows in NumPy: W and the bias stay fixed, and B and A train."""
    columns, module, sees = columns_of(100), nn.Sequential(nn.Linear(4, 1)), Sees()
    weight, bias = (p.detach().double().numpy() for p in module.parameters())
    x, y = columns["x"].astype(np.float64), columns["y"].astype(np.float64)
    result = runs.here(
        columns,
        UserObjects(module=module, callbacks=(sees,)),
        batch_size=100,
        epochs=4,
        optimizer="sgd",
        learning_rate=0.1,
        lora={"rank": 1, "alpha": 3.0, "targets": ["0"], "dropout": 0.0, "train": []},
    )
    a, b = sees.first["0.lora_A"].double().numpy(), np.zeros((1, 1))
    assert not sees.first["0.lora_B"].any()
    for _ in range(4):
        errors = x @ (weight + 3 * b @ a).T + bias - y[:, None]
        gradient = 2 * errors.T @ x / len(x)  # gradient of the full weight
        a, b = a - 0.1 * 3 * b.T @ gradient, b - 0.1 * 3 * gradient @ a.T
    state = state_of(result)
    assert list(state) == ["0.bias", "0.weight"]
    assert np.allclose(state["0.weight"].numpy(), weight + 3 * b @ a, atol=1e-6)
    assert np.allclose(state["0.bias"].numpy(), bias)
    adapter = load_file(Path(result.checkpoint_uri) / "adapter.safetensors")
    assert np.allclose(adapter["0.lora_B"].numpy(), b, atol=1e-6)
    assert np.allclose(adapter["0.lora_A"].numpy(), a, atol=1e-6)


def test_an_adapter_outlives_its_folder_as_the_weights_do(runs: Runs) -> None:
    """A pipeline may be saved over its own folder, which Spark removes first."""
    uri = runs.here(100, lora=LORA).checkpoint_uri
    before, held = read_adapter(uri), HeldWeights(uri)
    held.hold()
    shutil.rmtree(uri)
    assert held.adapter().keys() == before.keys()
    held.copy_to(str(runs.folder / "kept"))
    after = read_adapter(str(runs.folder / "kept"))
    assert before.keys() == after.keys()
    assert all(torch.equal(before[name], after[name]) for name in before)


class _Reads(nn.Module):
    """Reads the weight of its layer without calling the layer, or also calls it."""

    def __init__(self, calls: bool) -> None:
        super().__init__()
        self.layer, self.calls = nn.Linear(4, 1), calls

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        read = nn.functional.linear(x, self.layer.weight)
        return read + self.layer(x) if self.calls else read  # type: ignore[no-any-return]


@pytest.mark.parametrize(
    ("calls", "message"),
    [
        (False, "'layer', which the forward of model _Reads does not call"),
        (True, r"model _Reads gives other outputs once .* are merged"),
    ],
)
def test_an_adapter_of_no_use_or_that_merges_change_is_refused(runs: Runs, calls: bool, message: str) -> None:
    lora = {"rank": 1, "alpha": 1, "targets": ["layer"], "dropout": 0.0, "train": []}
    with pytest.raises(ValueError, match=message):
        runs.check(100, UserObjects(module=_Reads(calls)), lora=lora)


class _Saves(Callback):
    def __init__(self, path: Path) -> None:
        self.path = path

    def on_train_end(self, state: TrainingState) -> None:
        torch.save(state.module, self.path)


def test_a_callback_may_save_a_module_with_a_frozen_normalisation(runs: Runs) -> None:
    path = runs.folder / "module.pt"
    objects = UserObjects(module=_normed(), callbacks=(_Saves(path),))
    runs.here(100, objects, epochs=1, freeze=("body.*",))
    found = torch.load(path, weights_only=False).train()
    assert found.training
    assert not found.body[1].training


def test_the_average_is_that_of_sgd_by_hand(runs: Runs) -> None:
    """Linear regression over all rows; validation and model use the average, and training steps do not."""
    columns, module = columns_of(120), nn.Sequential(nn.Linear(4, 1))
    result = runs.here(
        runs.shards(columns, validation=np.arange(120) >= 100),
        UserObjects(module=module),
        batch_size=100,
        epochs=5,
        optimizer="sgd",
        learning_rate=0.1,
        ema_decay=0.7,
        keep="best",
        monitor="validation_loss",
    )
    weights = np.append(*(p.detach().double().numpy().ravel() for p in module.parameters()))
    x = np.c_[columns["x"].astype(np.float64), np.ones(120)]
    y = columns["y"].astype(np.float64)
    average = weights.copy()
    for record in result.history:
        weights = weights - 0.1 * 2 * x[:100].T @ (x[:100] @ weights - y[:100]) / 100
        average = 0.7 * average + 0.3 * weights
        loss = np.mean((x[100:] @ average - y[100:]) ** 2)
        assert record.validation_loss == pytest.approx(loss, rel=1e-5)
    state = state_of(result)
    assert result.checkpoint_epoch == 5
    assert np.allclose(np.append(state["0.weight"].numpy(), state["0.bias"].numpy()), average, atol=1e-6)


class _Spoils(nn.Linear):
    """Has a non-finite loss for a first feature above 50."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        bad = (x[:, :1] > 50).any() if self.training else torch.tensor(False)
        return super().forward(x) * torch.where(bad, torch.nan, 1.0)


def test_a_step_that_is_skipped_leaves_the_average_alone(runs: Runs) -> None:
    """Training without the skipped rows gives a bit-identical average."""
    columns, objects = columns_of(96), UserObjects(module=_Spoils(4, 1))
    columns["x"][40, 0] = 99.0
    rest = {name: np.delete(values, slice(32, 64), axis=0) for name, values in columns.items()}
    changes: dict[str, Any] = {"shuffle": False, "epochs": 1, "ema_decay": 0.5}
    spoiled, clean = (runs.shards(rows, num_files=1, row_group_rows=32) for rows in (columns, rest))
    result = runs.here(spoiled, objects, on_non_finite="skip", **changes)
    assert [step.step for step in result.non_finite] == [2]
    assert_equal_states(result, runs.here(clean, objects, **changes))


def test_buffers_are_not_averaged(runs: Runs) -> None:
    objects = UserObjects(module=_normed())
    plain, averaged = (state_of(runs.here(100, objects, ema_decay=decay)) for decay in (None, 0.9))
    same = {name for name in plain if torch.equal(plain[name], averaged[name])}
    assert same == {f"body.1.{name}" for name in ("running_mean", "running_var", "num_batches_tracked")}


@pytest.mark.parametrize("tuning", ["lora", "average", "all"])
def test_a_training_goes_on_to_the_bit(runs: Runs, tuning: str) -> None:
    config = runs.config(100, checkpoint_every_steps=3, optimizer="adamw", **TUNINGS[tuning])
    straight, resumed = equal_to_undisturbed(config, step=5, train=train_here)
    assert resumed.resumed_steps == (3,)
    assert_equal_states(straight, resumed)
    assert records_of(straight) == records_of(resumed)


def test_an_average_that_is_a_link_is_no_plain_file_of_a_checkpoint(runs: Runs) -> None:
    objects = UserObjects(callbacks=(Fails(runs.folder / "mark", step=5),))
    with pytest.raises(RuntimeError, match="step 5"):
        runs.here(100, objects, run="run", ema_decay=0.8, checkpoint_every_steps=3)
    (folder,) = (runs.folder / "run" / "checkpoints").iterdir()
    verify(str(folder))
    average = folder / "average.safetensors"
    average.symlink_to(average.rename(runs.folder / "elsewhere"))
    with pytest.raises(ValueError, match=r"average\.safetensors is a link"):
        verify(str(folder))


def test_a_warning_says_that_the_average_will_be_of_the_first_weights(runs: Runs) -> None:
    with pytest.warns(UserWarning, match=r"leaves 99% of the initial .* 8 steps; lower emaDecay to 0.56"):
        runs.check(100, ema_decay=0.999)


@pytest.mark.distributed
@pytest.mark.slow
@pytest.mark.parametrize("tuning", TUNINGS)
@pytest.mark.parametrize(("sharding", "collective"), SHARDINGS)
def test_two_workers_equal_one(runs: Runs, tuning: str, sharding: str, collective: str) -> None:
    """The last batch leaves a rank without rows, and the training writes a checkpoint."""
    manifest = runs.shards(97, validation=np.arange(97) >= 90, row_group_rows=90)
    changes = TUNINGS[tuning] | {"keep": "best", "optimizer": "sgd", "max_grad_norm": 0.5}
    one = runs.here(manifest, **changes)
    changes |= {"sync": sync_of(sharding=sharding), "collective": collective, "checkpoint_every_steps": 2}
    two = runs.gang(manifest, **changes)
    assert_equal_states(one, two, bound=1e-6)
    losses = [[record.validation_loss for record in run.history] for run in (one, two)]
    assert losses[0] == pytest.approx(losses[1], rel=1e-5)
