"""Networks that are more than modules and numbers, and the same training in plain PyTorch.

Each case is a function without arguments that makes a new `Case` for every training.
"""

from __future__ import annotations

import warnings
import weakref
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.nn.utils import parametrizations, parametrize, prune
from torch.nn.utils import weight_norm as old_weight_norm

from ringspark.estimators.training.callbacks import Callback, TrainingState
from ringspark.estimators.training.settings.config import UserObjects

EPOCHS, BATCH, RATE = 2, 32, 0.05


def make_columns(rows: int) -> dict[str, np.ndarray]:
    """Returns `rows` rows with 4 features `x` and a label `y`."""
    rng = np.random.default_rng(5)
    x = rng.normal(size=(rows, 4)).astype(np.float32)
    return {"x": x, "y": (x @ np.array([1, -2, 0.5, 1], np.float32) + 1).astype(np.float32)}


def _adam(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.Adam(parameters, RATE)


def _adamw_by_flag(parameters: Any) -> torch.optim.Optimizer:
    parameters = list(parameters)
    kept = [p for p in parameters if not getattr(p, "_no_weight_decay", False)]
    rest = [p for p in parameters if getattr(p, "_no_weight_decay", False)]
    groups = [{"params": kept, "weight_decay": 2.0}, {"params": rest, "weight_decay": 0.0}]
    return torch.optim.AdamW([group for group in groups if group["params"]], RATE)


@dataclass(frozen=True, kw_only=True)
class Case:
    """A network and what belongs to its training.

    Attributes:
        refusal: Part of the sentence with which the driver refuses the case; None if it must train.
    """

    module: nn.Module
    optimizer: Callable[[Any], torch.optim.Optimizer] = _adam
    callbacks: tuple[Callback, ...] = ()
    loss: Any = None
    refusal: str | None = None

    def objects(self) -> UserObjects:
        losses = () if self.loss is None else (self.loss,)
        return UserObjects(
            module=self.module, optimizer=self.optimizer, callbacks=self.callbacks, losses=losses
        )


@dataclass
class _Epoch:
    module: nn.Module
    epoch: int = 0
    optimizer: Any = None
    others: dict[str, Any] = field(default_factory=dict)


def train_plain(case: Case, columns: dict[str, np.ndarray]) -> dict[str, torch.Tensor]:
    """Trains in one process on whole batches; returns the state dict."""
    x, y = torch.from_numpy(columns["x"]), torch.from_numpy(columns["y"])
    module = case.module.train()
    optimizer = case.optimizer(module.parameters())
    for epoch in range(1, EPOCHS + 1):
        module.train()
        for start in range(0, len(x), BATCH):
            optimizer.zero_grad()
            output = module(x[start : start + BATCH])
            nn.functional.mse_loss(output.squeeze(-1), y[start : start + BATCH]).backward()
            optimizer.step()
        for callback in case.callbacks:
            state: Any = _Epoch(module, epoch, optimizer)
            callback.on_epoch_end(state)
    return {name: value.detach().clone() for name, value in module.state_dict().items()}


class _Net(nn.Module):
    """Two layers that each case changes."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(7)
        self.lin, self.out = nn.Linear(4, 6), nn.Linear(6, 1)
        self.act: Any = torch.tanh

    def forward(self, x: torch.Tensor) -> Any:
        return self.out(self.act(self.lin(x)))


def plain() -> Case:
    return Case(module=_Net())


def lambda_in_forward() -> Case:
    net = _Net()
    net.lin, net.inner = nn.Identity(), nn.Linear(4, 6)
    net.act = lambda x: torch.tanh(net.inner(x))
    return Case(module=net)


def bound_method() -> Case:
    net = _Net()
    net.act = partial(nn.Linear.forward, nn.Linear(6, 6))  # a layer that no optimizer knows
    net.extra = nn.Linear(6, 6)
    net.act = partial(nn.Module.__call__, net.extra)
    return Case(module=net)


def parameter_in_closure() -> Case:
    net = _Net()
    weight = net.scale = nn.Parameter(torch.ones(6))
    net.act = lambda x: x * weight
    return Case(module=net)


def hook_on_tensor() -> Case:
    net, mask = _Net(), torch.tensor([1.0, 0, 1, 0, 1, 0])[:, None]
    net.lin.weight.register_hook(lambda g: g * mask)
    return Case(module=net)


def hook_that_knows_its_parameter() -> Case:
    net = _Net()
    weight = net.lin.weight
    weight.register_hook(lambda g: g * (weight.detach() > 0))
    return Case(module=net)


def hook_after_accumulation() -> Case:
    net = _Net()

    def halve(parameter: Any) -> None:
        parameter.grad *= 0.5

    net.lin.weight.register_post_accumulate_grad_hook(halve)
    return Case(module=net)


class _Removes(_Net):
    def __init__(self) -> None:
        super().__init__()
        self.handle: Any = self.lin.weight.register_hook(torch.zeros_like)

    def forward(self, x: torch.Tensor) -> Any:
        self.handle.remove()
        return super().forward(x)


def handle_of_a_hook() -> Case:
    return Case(module=_Removes())


class _Feature(_Net):
    def __init__(self) -> None:
        super().__init__()
        self.feature: Any = None
        self.lin.register_forward_hook(lambda module, inputs, output: self.catch(output))

    def catch(self, output: torch.Tensor) -> None:
        self.feature = output

    def forward(self, x: torch.Tensor) -> Any:
        self.lin(x)
        return self.out(torch.tanh(self.feature))


def caught_feature() -> Case:
    return Case(module=_Feature())


def caught_feature_after_a_call() -> Case:
    net = _Feature()
    net(torch.randn(5, 4))
    return Case(module=net)


def hooks_on_modules() -> Case:
    net = _Net()
    factor = torch.tensor(0.5)
    net.lin.register_forward_pre_hook(lambda module, inputs: (inputs[0] * factor,))
    net.out.register_full_backward_hook(lambda module, inputs, outputs: (inputs[0] * factor,))
    return Case(module=net)


def flags() -> Case:
    net: Any = _Net()
    net.lin.weight._no_weight_decay = True
    net.out.bias._no_weight_decay = True
    return Case(module=net, optimizer=_adamw_by_flag)


class _Partner(_Net):
    def __init__(self) -> None:
        super().__init__()
        self.a = nn.Parameter(torch.ones(6))
        self.b = nn.Parameter(torch.full((6,), 0.3))
        self.a.partner, self.b.partner = self.b, self.a  # type: ignore[attr-defined]
        self.act = self.multiply

    def multiply(self, x: torch.Tensor) -> torch.Tensor:
        return x * self.a * self.a.partner  # type: ignore[attr-defined, no-any-return]


def parameters_that_know_each_other() -> Case:
    return Case(module=_Partner())


class _Knows(nn.Module):
    def __init__(self, parent: nn.Module) -> None:
        super().__init__()
        self.parent = weakref.ref(parent)

    def forward(self, x: torch.Tensor) -> Any:
        parent: Any = self.parent()
        return torch.tanh(x) * parent.scale


def weak_reference() -> Case:
    net = _Net()
    net.scale = nn.Parameter(torch.full((6,), 0.5))
    net.act = _Knows(net)
    return Case(module=net)


def tied_weights() -> Case:
    net = _Net()
    net.other = nn.Linear(6, 4, bias=False)
    net.other.weight = nn.Parameter(net.lin.weight.detach().t())  # a view of the same memory
    net.act = lambda x: net.lin(net.other(x))
    return Case(module=net)


def one_parameter_twice() -> Case:
    net = _Net()
    net.other = nn.Linear(4, 6)
    net.other.weight = net.lin.weight
    net.lin = nn.Sequential(net.lin, nn.Linear(6, 4), net.other)
    return Case(module=net)


class _View(_Net):
    """`forward` reads a view of a parameter."""

    def __init__(self) -> None:
        super().__init__()
        self.half = self.lin.weight.data[:3]

    def forward(self, x: torch.Tensor) -> Any:
        return super().forward(x) + (x @ self.half.t()).sum(1, keepdim=True)


def view_of_a_parameter() -> Case:
    return Case(module=_View(), refusal="cannot predict")


def weight_norm() -> Case:
    net = _Net()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # deprecated, and still in use
        old_weight_norm(net.lin)
    return Case(module=net)


def parametrized_weight_norm() -> Case:
    net = _Net()
    parametrizations.weight_norm(net.lin)
    return Case(module=net)


class _Symmetric(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x.triu() + x.triu(1).t()


def own_parametrization() -> Case:
    net = _Net()
    net.square = nn.Linear(6, 6)
    parametrize.register_parametrization(net.square, "weight", _Symmetric())
    net.act = net.square.forward
    return Case(module=net)


def spectral_norm() -> Case:
    net = _Net()
    parametrizations.spectral_norm(net.lin)
    return Case(module=net)


def pruned() -> Case:
    net = _Net()
    prune.l1_unstructured(net.lin, "weight", 0.5)
    return Case(module=net)


class _Counts(_Net):
    """A buffer that every forward pass in training moves, whatever its rows."""

    def __init__(self, persistent: bool = True) -> None:
        super().__init__()
        self.register_buffer("calls", torch.zeros(()), persistent=persistent)

    def forward(self, x: torch.Tensor) -> Any:
        if self.training:
            self.calls += 1
        return super().forward(x) / (1 + 0.1 * self.calls)


def counter() -> Case:
    return Case(module=_Counts())


def buffer_in_closure() -> Case:
    net = _Net()
    net.register_buffer("gain", torch.ones(6))
    gain = net.gain

    def act(x: torch.Tensor) -> torch.Tensor:
        if net.training:
            gain.mul_(0.9)
        return torch.tanh(x) * gain

    net.act = act
    return Case(module=net)


class _Creates(_Net):
    def forward(self, x: torch.Tensor) -> Any:
        if not hasattr(self, "mask"):
            self.register_buffer("mask", torch.tensor([1.0, 0, 1, 0, 1, 1]))
        return self.out(torch.tanh(self.lin(x)) * self.mask)


def buffer_created_in_forward() -> Case:
    return Case(module=_Creates(), refusal="cannot predict")


def frozen() -> Case:
    net = _Net()
    net.lin.requires_grad_(False)
    return Case(module=net)


class Thaws(Callback):
    """Trains a frozen layer from the second epoch on."""

    def on_epoch_end(self, state: TrainingState) -> None:
        layer: Any = state.module.get_submodule("lin")
        layer.requires_grad_(True)


def thawed() -> Case:
    net = _Net()
    net.lin.requires_grad_(False)
    return Case(module=net, callbacks=(Thaws(),))


class _Temperature(_Net):
    def __init__(self) -> None:
        super().__init__()
        self.temperature = nn.Parameter(torch.tensor(0.7))

    def forward(self, x: torch.Tensor) -> Any:
        return super().forward(x) * self.temperature.exp()


def scalar_parameter() -> Case:
    return Case(module=_Temperature())


class _Recurrent(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.rnn, self.out = nn.GRU(1, 5, batch_first=True), nn.Linear(5, 1)
        self.rnn.weight_hh_l0.register_hook(lambda g: g.tril())

    def forward(self, x: torch.Tensor) -> Any:
        return self.out(self.rnn(x[:, :, None])[0][:, -1])


def recurrent() -> Case:
    return Case(module=_Recurrent())


def transposed_memory() -> Case:
    net = _Net()
    net.lin.weight = nn.Parameter(torch.randn(4, 6, generator=torch.Generator().manual_seed(1)).t())
    return Case(module=net)


class _Hidden(_Net):
    """A list hides a layer, which an optimizer of `parameters()` does not know either."""

    def __init__(self) -> None:
        super().__init__()
        self.hidden = [nn.Linear(6, 6)]

    def forward(self, x: torch.Tensor) -> Any:
        return self.out(torch.tanh(self.hidden[0](self.lin(x))))


def hidden_layer() -> Case:
    return Case(module=_Hidden())


class _LearnedVariance(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.log_variance = nn.Parameter(torch.zeros(()))

    def forward(self, output: torch.Tensor, label: torch.Tensor) -> torch.Tensor:
        square = (output.squeeze(-1) - label) ** 2
        return square * (-self.log_variance).exp() + self.log_variance


def loss_with_parameters() -> Case:
    return Case(module=_Net(), loss=_LearnedVariance(), refusal="loss")


def loss_in_a_closure() -> Case:
    loss = _LearnedVariance()
    return Case(module=_Net(), loss=lambda output, label: loss(output, label), refusal="loss")


class _TupleInTraining(_Net):
    def forward(self, x: torch.Tensor) -> Any:
        output = super().forward(x)
        return (output, x) if self.training else output


class _Differentiates(_Net):
    """Returns a gradient with respect to its input, as networks of physics do."""

    def forward(self, x: torch.Tensor) -> Any:
        with torch.enable_grad():
            x = x.detach().requires_grad_()
            energy = super().forward(x).sum()
            (slope,) = torch.autograd.grad(energy, x, create_graph=True)
        return slope.sum(1, keepdim=True)


def gradient_in_forward() -> Case:
    return Case(module=_Differentiates())


def tuple_in_training() -> Case:
    return Case(module=_TupleInTraining(), refusal="in training")


CASES: dict[str, Callable[[], Case]] = {
    make.__name__: make
    for make in (
        plain,
        lambda_in_forward,
        bound_method,
        parameter_in_closure,
        hook_on_tensor,
        hook_that_knows_its_parameter,
        hook_after_accumulation,
        handle_of_a_hook,
        caught_feature,
        caught_feature_after_a_call,
        hooks_on_modules,
        flags,
        parameters_that_know_each_other,
        weak_reference,
        tied_weights,
        one_parameter_twice,
        view_of_a_parameter,
        weight_norm,
        parametrized_weight_norm,
        own_parametrization,
        spectral_norm,
        pruned,
        counter,
        buffer_in_closure,
        buffer_created_in_forward,
        frozen,
        thawed,
        scalar_parameter,
        recurrent,
        transposed_memory,
        hidden_layer,
        loss_with_parameters,
        loss_in_a_closure,
        gradient_in_forward,
        tuple_in_training,
    )
}
