"""Networks composed of parts that are more than modules and numbers, and their training in plain PyTorch."""

import copy
import warnings
import weakref
from collections import namedtuple
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import numpy as np
import torch
from hypothesis import strategies as st
from torch import nn
from torch.nn import functional as F
from torch.nn.utils import parametrizations, parametrize, prune
from torch.nn.utils import weight_norm as old_weight_norm
from torch.utils.checkpoint import checkpoint

from ringspark.estimators.options.sync import AllReduce, Sync, Zero
from ringspark.estimators.training.callbacks import Callback, TrainingState
from ringspark.estimators.training.settings.config import UserObjects
from ringspark.models.outputs import as_outputs

EPOCHS, BATCH, RATE = 2, 32, 0.05
# The last of three steps has 19 rows, or one row, so that the second of two ranks has none.
ROWS = (83, 65)
# Adam would turn rounding errors of a zero gradient into whole steps.
EPS = 1e-3


def make_columns(rows: int) -> dict[str, np.ndarray]:
    rng = np.random.default_rng(5)
    x = rng.normal(size=(rows, 4)).astype(np.float32)
    return {"x": x, "y": (x @ np.array([1, -2, 0.5, 1], np.float32) + 1).astype(np.float32)}


class Net(nn.Module):
    """Three layers; parts append functions to `stages`, which run after `lin`."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(7)
        self.lin, self.mid, self.out = nn.Linear(4, 6), nn.Linear(6, 6), nn.Linear(6, 1)
        self.stages: list[Any] = []
        self.pack: Any = None

    def forward(self, x: torch.Tensor) -> Any:
        hidden = self.lin(x)
        for stage in self.stages:
            hidden = stage(hidden)
        output = self.out(torch.tanh(self.mid(hidden)))
        return output if self.pack is None else self.pack(self, output)

    def add(self, value: Any) -> Any:
        setattr(self, f"extra{sum(1 for name in dir(self) if name.startswith('extra'))}", value)
        return value


Part = Callable[[Any, nn.Module], None]  # (net, layer)
PARTS: dict[str, Part] = {}
# Parts that the driver refuses -> a part of the sentence.
REFUSED: dict[str, str] = {}


def part(function: Part) -> Part:
    PARTS[function.__name__] = function
    return function


def refused(sentence: str) -> Callable[[Part], Part]:
    def register(function: Part) -> Part:
        REFUSED[function.__name__] = sentence
        return part(function)

    return register


def _is_plain(layer: nn.Module) -> bool:
    return set(dict(layer.named_parameters())) == {"weight", "bias"} and not layer._backward_hooks


def _weight(layer: nn.Module) -> Any:
    # Norms and prunings replace "weight" by other parameters.
    return dict(layer.named_parameters()).get("weight", next(layer.parameters()))


def _with_buffer(net: Any, name: str, value: torch.Tensor, persistent: bool = True) -> Any:
    """Returns a new module of the network that has the buffer."""
    owner = net.add(nn.Module())
    owner.register_buffer(name, value, persistent)
    return owner


PARTS |= {
    "network_in_a_closure": lambda net, layer: net.stages.append(lambda h: h + torch.tanh(net.mid(h))),
    "recomputed": lambda net, layer: net.stages.append(lambda h: checkpoint(net.mid, h, use_reentrant=False)),
    "hook_that_clips": lambda net, layer: _weight(layer).register_hook(lambda g: g.clamp(-0.02, 0.02)),
    "flags": lambda net, layer: setattr(_weight(layer), "_no_weight_decay", True),
    "parametrized_weight_norm": lambda net, layer: parametrizations.weight_norm(layer),
    "spectral_norm": lambda net, layer: parametrizations.spectral_norm(layer),
    "pruned": lambda net, layer: prune.l1_unstructured(layer, "weight", 0.5),
    "frozen": lambda net, layer: layer.requires_grad_(False),
    "weights_that_a_callback_clips": lambda net, layer: setattr(net, "clips", True),
}


@part
def layer_in_a_closure(net: Any, layer: nn.Module) -> None:
    extra = net.add(nn.Linear(6, 6))
    net.stages.append(lambda h: torch.tanh(extra(h)))


@part
def bound_method(net: Any, layer: nn.Module) -> None:
    net.stages += [partial(nn.Module.__call__, net.mid), net.add(nn.Linear(6, 6)).forward]


@part
def parameter_in_a_closure(net: Any, layer: nn.Module) -> None:
    weight = net.add(nn.Parameter(torch.ones(6)))
    net.stages.append(lambda h: h * weight)


@part
def hidden_layer(net: Any, layer: nn.Module) -> None:
    """No optimizer of `parameters()` knows this layer."""
    hidden = [nn.Linear(6, 6)]
    net.stages.append(lambda h: torch.tanh(hidden[0](h)))


class _Knows(nn.Module):
    def __init__(self, parent: nn.Module) -> None:
        super().__init__()
        self.parent = weakref.ref(parent)

    def forward(self, h: torch.Tensor) -> Any:
        parent: Any = self.parent()
        return torch.tanh(h) * parent.scale


@part
def weak_reference(net: Any, layer: nn.Module) -> None:
    net.scale = nn.Parameter(torch.full((6,), 0.5))
    net.stages.append(net.add(_Knows(net)))


@part
def parameters_that_know_each_other(net: Any, layer: nn.Module) -> None:
    a, b = net.add(nn.Parameter(torch.ones(6))), net.add(nn.Parameter(torch.full((6,), 0.3)))
    a.partner, b.partner = b, a
    net.stages.append(lambda h: h * a * a.partner)


@part
def parameters_in_containers(net: Any, layer: nn.Module) -> None:
    held = net.add(nn.ParameterDict({"gain": torch.ones(6)}))
    more = net.add(nn.ParameterList([torch.zeros(6)]))
    net.stages.append(lambda h: h * held["gain"] + more[0])


@part
def scalar_parameter(net: Any, layer: nn.Module) -> None:
    temperature = net.add(nn.Parameter(torch.tensor(0.3)))
    net.stages.append(lambda h: h * temperature.exp())


class _Tagged(nn.Parameter):
    pass


@part
def parameter_of_a_subclass(net: Any, layer: nn.Module) -> None:
    gain = net.add(_Tagged(torch.ones(6)))
    net.stages.append(lambda h: h * gain if isinstance(gain, _Tagged) else h)


@part
def recurrent(net: Any, layer: nn.Module) -> None:
    rnn = net.add(nn.GRU(1, 6, batch_first=True))
    rnn.weight_hh_l0.register_hook(lambda g: g.tril())
    net.stages.append(lambda h: rnn(h[:, :, None])[0][:, -1])


@part
def one_module_twice(net: Any, layer: nn.Module) -> None:
    net.again = net.mid
    net.stages.append(lambda h: torch.tanh(net.again(h)))


@part
def unused_and_empty_parameters(net: Any, layer: nn.Module) -> None:
    net.add(nn.Parameter(torch.ones(3)))
    empty = net.add(nn.Parameter(torch.ones(0)))
    net.stages.append(lambda h: h + empty.sum())


@part
def complex_parameter(net: Any, layer: nn.Module) -> None:
    turn = net.add(nn.Parameter(torch.full((6,), 1 + 1j)))
    net.stages.append(lambda h: (h * turn).real)


@part
def functional_call(net: Any, layer: nn.Module) -> None:
    def act(h: torch.Tensor) -> Any:
        halved = {name: value * 0.5 for name, value in net.mid.named_parameters()}
        return torch.tanh(torch.func.functional_call(net.mid, halved, h))

    net.stages.append(act)


@part
def hook_on_tensor(net: Any, layer: nn.Module) -> None:
    weight = _weight(layer)
    mask = (torch.arange(weight.numel()) % 2).reshape(weight.shape).float()
    weight.register_hook(lambda g: g * mask)


@part
def hook_that_knows_its_parameter(net: Any, layer: nn.Module) -> None:
    weight = _weight(layer)
    weight.register_hook(lambda g: g * (weight.detach() > 0))


@part
def hook_after_accumulation(net: Any, layer: nn.Module) -> None:
    def halve(parameter: Any) -> None:
        parameter.grad *= 0.5

    _weight(layer).register_post_accumulate_grad_hook(halve)


@part
def handle_of_a_hook(net: Any, layer: nn.Module) -> None:
    handle = _weight(layer).register_hook(torch.zeros_like)

    def remove(h: torch.Tensor) -> torch.Tensor:
        handle.remove()
        return h

    net.stages.append(remove)


@part
def caught_feature_after_a_call(net: Any, layer: nn.Module) -> None:
    net.feature = None

    def catch(module: nn.Module, inputs: Any, output: torch.Tensor) -> None:
        net.feature = output

    net.lin.register_forward_hook(catch)
    net.stages.append(lambda h: h + torch.tanh(net.feature))
    net(torch.ones(5, 4))


@part
def hooks_on_modules(net: Any, layer: nn.Module) -> None:
    factor = torch.tensor(0.5)
    layer.register_forward_pre_hook(lambda module, inputs: (inputs[0] * factor,))
    layer.register_forward_hook(lambda module, inputs, output: output + factor)
    net.mid.register_full_backward_hook(lambda module, inputs, outputs: (inputs[0] * factor,))


@part
def one_parameter_twice(net: Any, layer: nn.Module) -> None:
    twin = net.add(nn.Linear(6, 6))
    twin.weight = _weight(net.mid)
    net.stages.append(lambda h: torch.tanh(twin(h)) if twin.weight.dim() == 2 else h)


@part
def tied_weights(net: Any, layer: nn.Module) -> None:
    other = net.add(nn.Linear(6, 4, bias=False))
    weight = _weight(net.lin).detach()
    if weight.shape == (6, 4):
        other.weight = nn.Parameter(weight.t())  # a view of the same memory
    net.stages.append(lambda h: net.lin(other(h)))


@refused("cannot predict")
def view_of_a_parameter(net: Any, layer: nn.Module) -> None:
    half = net.half = _weight(layer).data[:1]
    net.stages.append(lambda h: h + half.sum())


@part
def transposed_memory(net: Any, layer: nn.Module) -> None:
    weight = _weight(layer)
    if weight.dim() == 2:
        weight.data = weight.data.t().contiguous().t()


@part
def overlapping_parameters(net: Any, layer: nn.Module) -> None:
    row = net.add(nn.Parameter(_weight(net.mid).detach()[:1]))
    net.stages.append(lambda h: h + row.sum() * 0.1)


@part
def tensor_that_is_no_buffer(net: Any, layer: nn.Module) -> None:
    net.factors = torch.linspace(0.5, 1, 6)
    net.stages.append(lambda h: h * net.factors)


@part
def attribute_made_in_forward(net: Any, layer: nn.Module) -> None:
    def act(h: torch.Tensor) -> torch.Tensor:
        if not hasattr(net, "cache"):
            net.cache = torch.full((6,), 0.9)
        return h * net.cache

    net.stages.append(act)


@part
def moving_teacher(net: Any, layer: nn.Module) -> None:
    """Frozen weights follow trained ones in each forward pass in training."""
    teacher = net.add(copy.deepcopy(net.mid) if _is_plain(net.mid) else nn.Linear(6, 6)).requires_grad_(False)

    def act(h: torch.Tensor) -> torch.Tensor:
        if net.training:
            with torch.no_grad():
                for slow, fast in zip(teacher.parameters(), net.lin.parameters(), strict=False):
                    slow.mul_(0.9).add_(fast.mean(), alpha=0.1)
        return h + torch.tanh(teacher(h))

    net.stages.append(act)


@part
def number_that_only_training_reads(net: Any, layer: nn.Module) -> None:
    net.calls = 0

    def act(h: torch.Tensor) -> torch.Tensor:
        if not net.training:
            return h
        net.calls += 1
        return h * min(1.0, net.calls / 8)

    net.stages.append(act)


@part
def weight_norm(net: Any, layer: nn.Module) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # deprecated, and still in use
        old_weight_norm(layer)


class _Scaled(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.tensor(0.9))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * self.scale


@part
def parametrization_with_a_parameter(net: Any, layer: nn.Module) -> None:
    parametrize.register_parametrization(layer, "bias", _Scaled())


@part
def buffer_in_a_closure(net: Any, layer: nn.Module) -> None:
    gain = torch.ones(6)
    net.add(nn.Module()).register_buffer("gain", gain)

    def act(h: torch.Tensor) -> torch.Tensor:
        if net.training:
            gain.mul_(0.9)
        return torch.tanh(h) * gain

    net.stages.append(act)


@part
def buffer_that_only_training_reads(net: Any, layer: nn.Module) -> None:
    owner = _with_buffer(net, "calls", torch.zeros(()), persistent=False)

    def act(h: torch.Tensor) -> torch.Tensor:
        if not net.training:
            return h
        owner.calls += 1
        return h * (owner.calls / 8).clamp(max=1)

    net.stages.append(act)


@part
def one_buffer_twice(net: Any, layer: nn.Module) -> None:
    one, two, shared = net.add(nn.Module()), net.add(nn.Module()), torch.ones(6)
    one.register_buffer("shared", shared)
    two.register_buffer("shared", shared)

    def act(h: torch.Tensor) -> torch.Tensor:
        if net.training:
            one.shared.mul_(0.9)
        return h * two.shared

    net.stages.append(act)


@part
def buffer_on_a_parameter(net: Any, layer: nn.Module) -> None:
    owner = _with_buffer(net, "row", _weight(net.mid).data[:1])
    net.stages.append(lambda h: h + owner.row.sum() * 0.1)


class _ExtraState(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.calls = 0

    def forward(self, h: torch.Tensor) -> torch.Tensor:
        self.calls += self.training
        return h / (1 + self.calls)

    def get_extra_state(self) -> Any:
        return {"calls": self.calls}

    def set_extra_state(self, state: Any) -> None:
        self.calls = state["calls"]


@refused("get_extra_state")
def extra_state(net: Any, layer: nn.Module) -> None:
    net.stages.append(net.add(_ExtraState()))


@part
def hooks_of_the_state_dict(net: Any, layer: nn.Module) -> None:
    owner = net.add(nn.Module())
    owner.gain = nn.Parameter(torch.ones(6))

    def save(module: nn.Module, state: Any, prefix: str, *_: Any) -> None:
        state[f"{prefix}scale"] = state.pop(f"{prefix}gain")

    def load(module: nn.Module, state: Any, prefix: str, *_: Any) -> None:
        state[f"{prefix}gain"] = state.pop(f"{prefix}scale")

    owner.register_state_dict_post_hook(save)
    owner.register_load_state_dict_pre_hook(load)
    net.stages.append(lambda h: h * owner.gain)


@part
def replaced_buffer(net: Any, layer: nn.Module) -> None:
    owner = _with_buffer(net, "shift", torch.zeros(6))

    def act(h: torch.Tensor) -> torch.Tensor:
        if net.training:
            owner.shift = owner.shift * 0.5 + 0.1
        return h + owner.shift

    net.stages.append(act)


@part
def whole_numbers(net: Any, layer: nn.Module) -> None:
    owner = _with_buffer(net, "step", torch.tensor(0))
    owner.register_buffer("is_odd", torch.tensor(False))

    def act(h: torch.Tensor) -> torch.Tensor:
        if net.training:
            owner.step += 1
            owner.is_odd.logical_not_()
        return torch.where(owner.is_odd, h, h * 0.5)

    net.stages.append(act)


@part
def sparse_buffer(net: Any, layer: nn.Module) -> None:
    owner = _with_buffer(net, "edges", torch.eye(6).to_sparse(), persistent=False)
    net.stages.append(lambda h: torch.sparse.mm(owner.edges, h.t()).t())


@refused("dense")
def saved_sparse_buffer(net: Any, layer: nn.Module) -> None:
    owner = _with_buffer(net, "edges", torch.eye(6).to_sparse())
    net.stages.append(lambda h: torch.sparse.mm(owner.edges, h.t()).t())


@refused("cannot predict")
def buffer_created_in_forward(net: Any, layer: nn.Module) -> None:
    owner = net.add(nn.Module())

    def act(h: torch.Tensor) -> torch.Tensor:
        if not hasattr(owner, "mask"):
            owner.register_buffer("mask", torch.tensor([1.0, 0, 1, 0, 1, 1]))
        return torch.tanh(h) * owner.mask

    net.stages.append(act)


@refused("cannot predict")
def buffer_grown_in_forward(net: Any, layer: nn.Module) -> None:
    owner = _with_buffer(net, "seen", torch.zeros(1))

    def act(h: torch.Tensor) -> torch.Tensor:
        if net.training:
            owner.seen = torch.cat([owner.seen, owner.seen[-1:] + 1])
        return h / (1 + owner.seen[-1])

    net.stages.append(act)


@refused("cannot predict")
def number_in_a_closure(net: Any, layer: nn.Module) -> None:
    calls = [0]

    def act(h: torch.Tensor) -> torch.Tensor:
        calls[0] += net.training
        return h / (1 + calls[0])

    net.stages.append(act)


@part
def thawed(net: Any, layer: nn.Module) -> None:
    layer.requires_grad_(False)
    net.thaws = True


class _Clips(Callback):
    def on_step_end(self, state: TrainingState) -> None:
        with torch.no_grad():
            for parameter in state.module.parameters():
                parameter.clamp_(-0.5, 0.5)


class Thaws(Callback):
    """Trains frozen layers from the second epoch on."""

    def on_epoch_end(self, state: TrainingState) -> None:
        state.module.requires_grad_(True)


@part
def gradient_in_forward(net: Any, layer: nn.Module) -> None:
    """Adds a gradient with respect to the hidden values, as networks of physics do."""

    def act(h: torch.Tensor) -> torch.Tensor:
        with torch.enable_grad():
            inner = h if h.requires_grad else h.detach().requires_grad_()
            (slope,) = torch.autograd.grad(torch.tanh(net.mid(inner)).sum(), inner, create_graph=True)
        return h + slope

    net.stages.append(act)


# Attribute of the network -> its callback.
CALLBACKS: dict[str, Callable[[], Callback]] = {"clips": _Clips, "thaws": Thaws}


def adamw_by_flag(parameters: Any) -> torch.optim.Optimizer:
    flagged: dict[bool, list[Any]] = {False: [], True: []}
    for parameter in parameters:
        flagged[getattr(parameter, "_no_weight_decay", False)].append(parameter)
    groups = [{"params": own, "weight_decay": 0.0 if is_set else 2.0} for is_set, own in flagged.items()]
    return torch.optim.AdamW([group for group in groups if group["params"]], RATE, eps=EPS)


def two_rates(parameters: Any) -> torch.optim.Optimizer:
    vectors, rest = ([p for p in parameters if (p.dim() < 2) == is_vector] for is_vector in (True, False))
    groups = [{"params": vectors, "lr": RATE / 2, "nesterov": False}, {"params": rest}]
    return torch.optim.SGD([group for group in groups if group["params"]], RATE, momentum=0.9, nesterov=True)


class Counting(torch.optim.SGD):
    """Its decay depends on a tensor of the group, its own count, and a tensor of no parameter."""

    def __init__(self, parameters: Any) -> None:
        super().__init__(parameters, RATE)
        self.calls = 0
        self.state["all"] = {"sum": torch.zeros(2)}
        self.param_groups[0]["factors"] = torch.ones(2)

    def step(self, closure: Any = None) -> None:
        self.calls += 1
        common: Any = self.state["all"]
        common["sum"] += self.calls
        self.param_groups[0]["factors"][0] *= 0.9
        self.param_groups[0]["weight_decay"] = float(self.param_groups[0]["factors"].sum() / common["sum"][0])
        super().step()

    def state_dict(self) -> dict[str, Any]:
        return super().state_dict() | {"calls": self.calls}

    def load_state_dict(self, state_dict: Any) -> None:
        self.calls = state_dict.pop("calls")
        super().load_state_dict(state_dict)


OPTIMIZERS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "adam": partial(torch.optim.Adam, lr=RATE, eps=EPS),
    "amsgrad": partial(torch.optim.Adam, lr=RATE, eps=EPS, amsgrad=True, weight_decay=0.1),
    "rmsprop": partial(torch.optim.RMSprop, lr=RATE / 5, eps=10 * EPS, momentum=0.5),
    "adagrad": partial(torch.optim.Adagrad, lr=RATE, eps=EPS),
    "flags": adamw_by_flag,
    "two rates": two_rates,
    "counting": Counting,
    "fused": partial(torch.optim.AdamW, lr=RATE, eps=EPS, fused=True),
    "adafactor": partial(torch.optim.Adafactor, lr=RATE, eps=(EPS, EPS)),
}
# A schedule of ringspark, (step, number of steps) -> factor, or torch's, (optimizer) -> scheduler.
SCHEDULES: dict[str, Any] = {
    "none": None,
    "factor": lambda step, num_steps: 1 - step / (2 * num_steps),
    "StepLR": lambda optimizer: torch.optim.lr_scheduler.StepLR(optimizer, 2, 0.5),
    "OneCycleLR": lambda optimizer: torch.optim.lr_scheduler.OneCycleLR(
        # Each optimizer's own rate. At five times RMSprop's, plain PyTorch differs from itself by 1e-4 if the
        # rows of a batch come in another order.
        optimizer,
        [group["lr"] for group in optimizer.param_groups],
        total_steps=8,
        cycle_momentum=False,
    ),
}


class RowLoss(nn.Module):
    def forward(self, output: torch.Tensor, label: torch.Tensor) -> torch.Tensor:
        return (output.reshape(label.shape) - label) ** 2


class LearnedVariance(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.log_variance = nn.Parameter(torch.zeros(()))

    def forward(self, output: torch.Tensor, label: torch.Tensor) -> torch.Tensor:
        square = (output.reshape(label.shape) - label) ** 2
        return square * (-self.log_variance).exp() + self.log_variance


def _loss_in_a_closure() -> Any:
    loss = LearnedVariance()
    return lambda output, label: loss(output, label)


LOSSES: dict[str, Callable[[], Any]] = {
    "name": lambda: None,
    "nn": nn.MSELoss,
    "functional": lambda: F.mse_loss,
    "function": lambda: lambda output, label: (output.reshape(label.shape) - label) ** 2,
    "class": RowLoss,
    "with parameters": LearnedVariance,
    "with parameters in a closure": _loss_in_a_closure,
}


@dataclass
class Output:
    value: torch.Tensor
    hidden: torch.Tensor | None = None


Pair = namedtuple("Pair", ["value"])

PACKS: dict[str, Any] = {
    "column": None,
    "flat": lambda net, output: output[:, 0],
    "tuple": lambda net, output: (output,),
    "dict": lambda net, output: {"value": output},
    "dataclass": lambda net, output: Output(output),
    "named tuple": lambda net, output: Pair(output),
    "pair in training": lambda net, output: (output, output) if net.training else output,
}
REFUSED |= {
    "with parameters": "loss",
    "with parameters in a closure": "loss",
    "pair in training": "in training",
}


@dataclass(frozen=True, kw_only=True)
class Case:
    """A network and what belongs to its training."""

    module: Net
    optimizer: Callable[[Any], torch.optim.Optimizer]
    schedule: Any = None
    callbacks: tuple[Callback, ...] = ()
    loss: Any = None

    def objects(self) -> UserObjects:
        return UserObjects(
            module=self.module,
            optimizer=self.optimizer,
            lr_schedule=self.schedule,
            callbacks=self.callbacks,
            losses=() if self.loss is None else (self.loss,),
        )


@dataclass(frozen=True, kw_only=True)
class Recipe:
    """Names of the parts of a case; the text of a recipe repeats it.

    Attributes:
        parts: Name of a part and the layer that it changes, in this order.
    """

    parts: tuple[tuple[str, str], ...] = ()
    optimizer: str = "adam"
    schedule: str = "none"
    loss: str = "name"
    pack: str = "column"
    rows: int = ROWS[0]
    sync: Sync = field(default_factory=AllReduce)

    @property
    def refusal(self) -> str | None:
        """Part of the sentence with which the driver refuses the case; None if it must train."""
        names = (*(name for name, _ in self.parts), self.loss, self.pack)
        return next((REFUSED[name] for name in names if name in REFUSED), None)

    def make(self) -> Case:
        net = Net()
        for name, layer in self.parts:
            PARTS[name](net, net.get_submodule(layer))
        net.pack = PACKS[self.pack]
        return Case(
            module=net,
            optimizer=OPTIMIZERS[self.optimizer],
            schedule=SCHEDULES[self.schedule],
            callbacks=tuple(make() for name, make in CALLBACKS.items() if hasattr(net, name)),
            loss=LOSSES[self.loss](),
        )


def _often(names: Any) -> list[str]:
    """Returns names of which few are refused, so that most recipes train."""
    known = list(names)
    return known + 3 * [name for name in known if name not in REFUSED]


def _settle(recipe: Recipe) -> Recipe:
    """Leaves out what the training only warns of, a layer thawed with ZeRO, and labels that are broadcast."""
    is_thawed = any(name == "thawed" for name, _ in recipe.parts)
    recipe = replace(recipe, sync=AllReduce()) if is_thawed else recipe
    return replace(recipe, pack="flat") if recipe.loss == "functional" else recipe


recipes = st.builds(
    Recipe,
    parts=st.lists(
        st.tuples(st.sampled_from(_often(PARTS)), st.sampled_from(("lin", "mid", "out"))),
        min_size=1,
        max_size=4,
        unique=True,
    ).map(tuple),
    optimizer=st.sampled_from(list(OPTIMIZERS)),
    schedule=st.sampled_from(list(SCHEDULES)),
    loss=st.sampled_from(_often(LOSSES)),
    pack=st.sampled_from(_often(PACKS)),
    rows=st.sampled_from(ROWS),
    sync=st.sampled_from((AllReduce(), AllReduce(), Zero(stage=1), Zero(stage=2))),
).map(_settle)

# Each part, loss and output alone.
CASES = {
    **{name: Recipe(parts=((name, "lin"),), optimizer="flags") for name in PARTS},
    **{name: Recipe(loss=name, pack="flat") for name in LOSSES},
    **{name: Recipe(pack=name) for name in PACKS},
}


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
    optimizer = case.optimizer(list(module.parameters()))
    starts = range(0, len(x), BATCH)
    set_rate = _rates(case.schedule, optimizer, EPOCHS * len(starts))
    for epoch in range(EPOCHS):
        module.train()
        for number, start in enumerate(starts):
            set_rate(epoch * len(starts) + number)
            optimizer.zero_grad()
            output, *_ = as_outputs(module(x[start : start + BATCH]))
            F.mse_loss(output.reshape(-1), y[start : start + BATCH]).backward()
            optimizer.step()
            for callback in case.callbacks:
                callback.on_step_end(_Epoch(module))
        for callback in case.callbacks:
            state: Any = _Epoch(module, epoch + 1, optimizer)
            callback.on_epoch_end(state)
    return {name: v.detach().clone() for name, v in module.state_dict().items() if torch.is_tensor(v)}


def _rates(schedule: Any, optimizer: torch.optim.Optimizer, num_steps: int) -> Callable[[int], None]:
    """Returns a function that sets the rates of a step."""
    bases = [group["lr"] for group in optimizer.param_groups]
    if schedule is None:
        return lambda step: None
    if schedule is SCHEDULES["factor"]:

        def set_factor(step: int) -> None:
            for group, base in zip(optimizer.param_groups, bases, strict=True):
                group["lr"] = base * schedule(step, num_steps)

        return set_factor
    scheduler = schedule(optimizer)
    return lambda step: scheduler.step() if step else None
