"""Losses that take the network: second derivatives equal plain torch's, or `fit` refuses the combination."""

from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from once_differentiable import TwiceOnce
from small_networks import Net
from small_training import config_of, train_in_turn, weights_of
from torch import nn
from torch.nn.attention import SDPBackend, sdpa_kernel

from ringspark.estimators import Mesh, Pipeline, Zero
from ringspark.estimators.launch.local import train_here
from ringspark.estimators.training.check.driver import check_training
from ringspark.estimators.training.objective import losses
from ringspark.estimators.training.settings.config import TrainConfig, UserObjects
from ringspark.extras.network_losses.technique import NetworkLosses
from ringspark.extras.tables.tabpack import TabPack
from ringspark.pipelines import ShardManifest

ROWS, DIM, STEPS = 256, 4, 4
TOLERANCE = 1e-6
RATE = 0.05


class Cubes(nn.Module):
    """A network whose every layer has second derivatives, with blocks that can be recomputed and sharded."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.blocks, self.head = nn.Sequential(*(Block() for _ in range(4))), nn.Linear(DIM, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.blocks(x))


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(DIM, 8), nn.Linear(8, DIM)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = self.up(x)
        return x + self.down(torch.tanh(hidden) ** 3 + torch.relu(hidden) * hidden)


def penalty(module: nn.Module, inputs: Any, outputs: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    """Returns the squared error, and the gradient penalty of WGAN-GP at the inputs and at moved inputs."""
    (slope,) = torch.autograd.grad(outputs.sum(), inputs, create_graph=True)
    moved = (inputs[0] + 0.1).detach().requires_grad_()
    (other,) = torch.autograd.grad(module(moved).float().sum(), moved, create_graph=True)
    rows = (outputs[:, 0] - labels).square()
    return rows + (slope.norm(dim=1) - 1).square() + other.square().sum(1)


def train_plainly(columns: dict[str, Any], precision: str = "fp32", **_: Any) -> torch.Tensor:
    network = Cubes()
    x, y = (torch.from_numpy(columns[name]) for name in "xy")
    dtype = {"bf16": torch.bfloat16, "fp16": torch.float16}.get(precision)

    def call(inputs: torch.Tensor) -> torch.Tensor:
        with torch.autocast("cpu", dtype) if dtype else nullcontext():
            return network(inputs)

    scaler = torch.amp.GradScaler("cpu", enabled=precision == "fp16")
    optimizer = torch.optim.SGD(network.parameters(), RATE)
    for _ in range(STEPS):
        own = x.clone().requires_grad_()
        loss = penalty(call, (own,), call(own).float(), y).mean()
        optimizer.zero_grad()
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
    return torch.cat([p.detach().flatten() for p in network.parameters()])


@pytest.fixture
def columns() -> dict[str, Any]:
    rng = np.random.default_rng(0)
    return {"x": rng.normal(size=(ROWS, DIM)).astype("f4"), "y": rng.normal(size=ROWS).astype("f4")}


@pytest.fixture
def make_config(columns: dict[str, Any], make_shards: Any, tmp_path: Path) -> Callable[..., TrainConfig]:
    own = {"losses": (losses.NETWORK_LOSS,), "optimizer": "sgd", "learning_rate": RATE, "batch_size": ROWS}
    plain = config_of(make_shards(columns), tmp_path / "run", **own, epochs=STEPS)
    return lambda name="run", **changes: replace(plain, run_uri=str(tmp_path / name), **changes)


def _objects() -> UserObjects:
    return UserObjects(module=Cubes(), losses=(penalty,))


def _difference(result: Any, expected: torch.Tensor) -> float:
    return float((weights_of(result, Cubes()) - expected).abs().max())


ALONE: dict[str, dict[str, Any]] = {
    "plain": {},
    "checkpointing sqrt": {"gradient_checkpointing": "sqrt"},
    "checkpointing all": {"gradient_checkpointing": "all"},
    "offload": {"activation_offload": "disk"},
    "bits": {"activation_compression": "bits"},
    "accumulation": {"gradient_accumulation": 3},
    "skip": {"on_non_finite": "skip"},
    "bf16": {"precision": "bf16"},
    "fp16": {"precision": "fp16"},
}


@pytest.mark.parametrize("name", ALONE)
def test_a_gradient_penalty_trains_as_in_plain_torch(name: str, make_config: Any, columns: Any) -> None:
    """In 16 bits, plain torch trains under autocast."""
    result = train_here(make_config(**ALONE[name]), _objects())
    assert result.steps == STEPS
    assert _difference(result, train_plainly(columns, **ALONE[name])) <= TOLERANCE


PLAN = {"blocks.*.up": "column", "blocks.*.down": "row"}
TENSOR = {"parallelism": Mesh(tensor=2, plan=PLAN)}
GANGS = {"Zero 2, checkpointing": {"sync": Zero(stage=2), "gradient_checkpointing": "all"}, "tensor": TENSOR}
MORE_GANGS: dict[str, dict[str, Any]] = {
    "all-reduce": {},
    "Zero 1": {"sync": Zero(stage=1)},
    "Zero 2": {"sync": Zero(stage=2)},
    "tensor, checkpointing": TENSOR | {"gradient_checkpointing": "all"},
    "tensor grid": {"parallelism": Mesh(tensor=2, plan={"blocks.*.up": ["grid", [2, 1]]})},
}


@pytest.mark.parametrize("gangs", [GANGS, pytest.param(MORE_GANGS, marks=pytest.mark.slow)])
def test_a_gradient_penalty_trains_on_a_gang_as_in_torch(gangs: Any, make_config: Any, columns: Any) -> None:
    configs = {n: make_config(n, num_workers=2, collective="torch", **own) for n, own in gangs.items()}
    results = train_in_turn(configs, _objects())
    expected = train_plainly(columns)
    differences = {name: _difference(result, expected) for name, result in results.items()}
    assert max(differences.values()) <= TOLERANCE, differences


def test_the_validation_loss_differentiates_too(columns: Any, make_shards: Any, tmp_path: Path) -> None:
    held_out = np.arange(ROWS) % 4 == 0
    manifest = make_shards(columns, validation=held_out)
    still = {"optimizer": "sgd", "learning_rate": 1e-12, "epochs": 1}
    config = config_of(manifest, tmp_path / "run", losses=(losses.NETWORK_LOSS,), **still)
    found = train_here(config, _objects()).history[0].validation_loss
    x, y = (torch.from_numpy(columns[name][held_out]) for name in "xy")
    network = Cubes().eval()
    expected = penalty(network, (x.requires_grad_(),), network(x), y).mean()
    assert found == pytest.approx(expected.item(), rel=1e-6)


def attention() -> nn.Module:
    torch.manual_seed(0)
    layer = nn.TransformerEncoderLayer(2, 1, 4, dropout=0.0, batch_first=True)
    parts = {"layer": layer, "head": nn.Linear(DIM, 1)}
    return Net(lambda self, x: self.head(self.layer(x.view(-1, DIM // 2, 2)).flatten(1)), **parts)


@pytest.mark.parametrize("policy", ["none", ("layer",)])
def test_attention_is_differentiated_twice(policy: Any, make_config: Any, columns: Any) -> None:
    config = make_config(gradient_checkpointing=policy, epochs=1)
    found = weights_of(train_here(config, UserObjects(module=attention(), losses=(penalty,))), attention())
    network = attention()
    x, y = (torch.from_numpy(columns[name]) for name in "xy")
    with sdpa_kernel(SDPBackend.MATH):
        penalty(network, (x.requires_grad_(),), network(x), y).mean().backward()
    expected = torch.cat([(p - RATE * p.grad).detach().flatten() for p in network.parameters()])
    assert float((found - expected).abs().max()) <= TOLERANCE


class Once(Cubes):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(TwiceOnce.apply(x))


def test_layers_with_one_derivative_are_refused_on_the_driver(make_config: Any) -> None:
    config = make_config()
    manifest = ShardManifest.load(config.shards_uri)
    with pytest.raises(ValueError, match=r"fails with model Once: .* change the loss, or use layers"):
        check_training(config, UserObjects(module=Once(), losses=(penalty,)), manifest)


@pytest.mark.parametrize(
    ("changes", "remedy"),
    [
        ({"compile": True}, "set a loss of outputs and labels, or leave compile"),
        ({"activation_compression": "int8"}, "set a loss .* or set activationCompression="),
        ({"activation_compression": "fp8"}, "set a loss .* or set activationCompression="),
        ({"sync": Zero(stage=3)}, r"set a loss .* or set sync=Zero\(stage=1\)"),
        ({"parallelism": Mesh(pipeline=Pipeline(2))}, "give all workers to 'data'"),
        ({"parallelism": Mesh(sequence=2)}, "give all workers to 'data'"),
        ({"parallelism": Mesh(expert=2)}, "give all workers to 'data'"),
        ({"parallelism": Mesh(tensor=2, sequence_parallel=True)}, "give all workers to 'data'"),
    ],
)
def test_settings_with_one_derivative_are_refused(changes: Any, remedy: str, make_config: Any) -> None:
    with pytest.raises(ValueError, match=f"a loss that takes the module .*; {remedy}"):
        make_config(num_workers=2, collective="torch", **changes)


def test_a_pack_scales_gradients_and_is_refused() -> None:
    pack = TabPack(edges=[[0.0, 1.0]], cardinalities=[], out_features=1, scale=3.0)
    with pytest.raises(ValueError, match="model TabPack scales the gradients of its members"):
        NetworkLosses().check(SimpleNamespace(module=pack))


class PenaltyModule(nn.Module):
    def forward(self, module: Any, inputs: Any, outputs: Any, labels: Any) -> torch.Tensor:
        return penalty(module, inputs, outputs, labels)


@pytest.mark.parametrize(
    ("loss", "sees"),
    [
        (penalty, True),
        (PenaltyModule(), True),
        (partial(lambda weight, module, inputs, outputs, labels: outputs, 2.0), True),
        (lambda module, inputs, outputs, labels, weight=1.0: outputs, True),
        (lambda output, label: output, False),
        (lambda output, label, a=1, b=2: output, False),
        (nn.MSELoss(), False),
        ("mse", False),
        (torch.sub, False),
    ],
)
def test_the_signature_decides_what_a_loss_gets(loss: Any, sees: bool) -> None:
    assert losses.sees_network(loss) == sees
    assert (losses.name_loss(loss) == losses.NETWORK_LOSS) == sees
    assert isinstance(losses.resolve_loss(loss), losses.NetworkLoss) == sees
