"""What would end in a worker is refused by the driver in one sentence, or works."""

import functools
import gc
from typing import Any

import pytest
import torch
from awkward_networks import make_columns
from small_training import Runs
from torch import nn
from torch.nn import functional as F

from ringspark.estimators import user_code
from ringspark.estimators.training.check.driver import check_training
from ringspark.estimators.training.settings.config import UserObjects


class _MeanOfClasses(nn.CrossEntropyLoss):
    def forward(self, output: torch.Tensor, label: torch.Tensor) -> torch.Tensor:
        return super().forward(output, label).mean()


def _cycle(optimizer: Any) -> Any:
    return torch.optim.lr_scheduler.OneCycleLR(optimizer, 0.1, total_steps=4)


class _Differentiates(nn.Linear):
    """Returns a gradient with respect to its input, which `torch.no_grad` of a prediction forbids."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x.detach().requires_grad_()
        (slope,) = torch.autograd.grad(super().forward(x).tanh().sum(), x, create_graph=True)
        return slope.sum(1)


class _DifferentiatesInEvaluation(_Differentiates):
    """Differentiates in evaluation only; training uses the plain layer."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return nn.Linear.forward(self, x)[:, 0] if self.training else super().forward(x)


def _net(outputs: int = 1) -> nn.Module:
    return nn.Sequential(nn.Linear(4, outputs), *([nn.Flatten(0)] if outputs == 1 else []))


@pytest.mark.parametrize(
    ("sentence", "changes"),
    [
        ("one value per row", {"module": _net(3), "losses": (_MeanOfClasses(),)}),
        ("lrSchedule .* step 6 of 6", {"module": _net(), "lr_schedule": _cycle}),
        (r"float64, .*\.float\(\)", {"module": _net().double()}),
        (r"with torch\.enable_grad\(\):", {"module": _Differentiates(4, 1)}),
        (r"with torch\.enable_grad\(\):", {"module": _DifferentiatesInEvaluation(4, 1)}),
    ],
)
def test_the_driver_refuses_in_a_sentence(runs: Runs, sentence: str, changes: dict[str, Any]) -> None:
    columns = make_columns(83)
    columns["y"] = (columns["y"] > 0).astype("float32")
    with pytest.raises(ValueError, match=sentence):
        runs.check(columns, UserObjects(**changes), task="any")


def test_a_functional_loss_is_called_per_row(runs: Runs) -> None:
    network = _net()
    losses = [
        runs.here(83, UserObjects(module=network, losses=given)).history[-1].train_loss
        for given in ((), (F.mse_loss,))
    ]
    assert losses[0] == pytest.approx(losses[1], rel=1e-6)


def test_a_cached_function_and_property_of_a_script_reach_the_workers() -> None:
    @functools.lru_cache(maxsize=7)
    def double(number: int) -> int:
        return 2 * number

    class Squares:
        @functools.cached_property
        def four(self) -> int:
            return 4

    function, made = user_code.loads(user_code.dumps((double, Squares)))
    assert function(4) == 8
    assert function.cache_parameters()["maxsize"] == 7
    copied = made()
    assert (copied.four, vars(copied)) == (4, {"four": 4})


class _Pair(nn.Linear):
    def forward(self, left: torch.Tensor, right: torch.Tensor) -> torch.Tensor:
        return super().forward(torch.stack([left, 2 * right], 1))[:, 0]


def test_inputs_in_another_order_than_forward_are_named(runs: Runs) -> None:
    columns = {name: make_columns(83)["y"] for name in ("left", "right", "y")}
    with pytest.warns(UserWarning, match=r"by position, but forward of _Pair takes \['left', 'right'\]"):
        runs.check(columns, UserObjects(module=_Pair(2, 1)), input_columns=("right", "left"))


class _Graph(nn.Linear):
    """Reads a sparse buffer, as graph networks do."""

    def __init__(self, persistent: bool) -> None:
        super().__init__(4, 1)
        self.register_buffer("edges", torch.eye(4).to_sparse(), persistent=persistent)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(torch.sparse.mm(self.edges, x.t()).t())[:, 0]  # type: ignore[arg-type]


def test_a_network_with_a_sparse_buffer_trains_or_is_refused(runs: Runs) -> None:
    changes = {"checkpoint_every_steps": 1, "on_non_finite": "skip"}
    result = runs.here(83, UserObjects(module=_Graph(persistent=False)), **changes)
    assert result.checkpoint_errors == ()
    assert result.lost_state == ()
    with pytest.raises(ValueError, match=r"edges.*dense"):
        runs.check(83, UserObjects(module=_Graph(persistent=True)), **changes)


@pytest.mark.parametrize("by", ["identity", "dimensions"])
def test_groups_that_a_copy_would_lose_are_refused(runs: Runs, by: str) -> None:
    net = nn.Sequential(nn.Linear(4, 3), nn.ReLU(), nn.Linear(3, 1), nn.Flatten(0))
    head = {id(parameter) for parameter in net[2].parameters()}

    def optimizer(parameters: Any) -> torch.optim.Optimizer:
        chosen = [id(p) in head if by == "identity" else p.ndim > 1 for p in parameters]
        groups = [[p for p, own in zip(parameters, chosen, strict=True) if own == first] for first in (1, 0)]
        return torch.optim.SGD([{"params": groups[0], "lr": 0.05}, {"params": groups[1], "lr": 0.001}], 0.05)

    objects = UserObjects(module=net, optimizer=optimizer)
    if by == "dimensions":
        runs.check(20, objects)
        return
    with pytest.raises(ValueError, match=r"differently on the workers, for example \['2.bias', '2.weight'\]"):
        runs.check(20, objects)


def test_a_buffer_that_is_an_expanded_view_is_checked(runs: Runs) -> None:
    net = _net()
    net.register_buffer("mask", torch.ones(1, 6).expand(3, 6))
    runs.check(20, UserObjects(module=net))


def test_the_check_leaves_no_hook_and_no_moved_value(runs: Runs) -> None:
    class Codebook(nn.Linear):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            self.size.data.mul_(0.9)
            self.bias.data.clamp_(-0.1, 0.1)
            return super().forward(x)[:, 0]

    net = Codebook(4, 1)
    net.register_buffer("size", torch.ones(1))
    net.bias.data.fill_(0.5)

    def optimizer(parameters: Any) -> torch.optim.Optimizer:
        for parameter in parameters:
            parameter.register_hook(lambda gradient: gradient / 2)
        return torch.optim.SGD(parameters, 0.1)

    runs.check(20, UserObjects(module=net, optimizer=optimizer))
    assert not net.weight._backward_hooks
    assert (net.size.item(), net.bias.item()) == (1.0, 0.5)


def test_the_result_of_the_checks_keeps_no_copy_of_the_network(runs: Runs) -> None:
    class Counted(nn.Linear):
        """Its objects are counted."""

    net = nn.Sequential(Counted(4, 1), nn.Flatten(0))
    checked = check_training(runs.config(20), UserObjects(module=net), runs.manifest(20))
    gc.collect()
    assert [each for each in gc.get_objects() if isinstance(each, Counted)] == [net[0]]
    assert checked.shapes == ((),)
