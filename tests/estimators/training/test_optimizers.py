"""Optimizers: the registry, groups of parameters, and factories, also on several ranks."""

from __future__ import annotations

import json
import warnings
from typing import Any

import pytest
import torch
from torch import nn

from ringspark.estimators.collectives import COLLECTIVES, Collective
from ringspark.estimators.collectives.local_collective import LocalCollective
from ringspark.estimators.launch.local import run_spawned
from ringspark.estimators.training.optimizers import (
    OPTIMIZERS,
    build_optimizer,
    check_groups,
    group_parameters,
    make_optimizer,
)
from ringspark.estimators.training.status import Status

GANGS = [name for name in COLLECTIVES if name != "local"]


def _module() -> nn.Module:
    torch.manual_seed(0)
    module = nn.Sequential()
    module.add_module("encoder", nn.Linear(3, 4))
    module.add_module("norm", nn.LayerNorm(4))
    module.add_module("head", nn.Linear(4, 1))
    return module


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_every_optimizer_lowers_a_quadratic(name: str) -> None:
    parameter = nn.Parameter(torch.tensor([3.0]))
    optimizer = make_optimizer(name, [parameter], learning_rate=0.05, weight_decay=0.0)
    assert optimizer.param_groups[0]["lr"] == 0.05
    for _ in range(100):
        optimizer.zero_grad()
        (parameter**2).sum().backward()
        optimizer.step()
    # Adadelta starts at steps of a thousandth of its rate.
    assert abs(parameter.item()) < (2.9999 if name == "adadelta" else 2.5)


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_every_optimizer_decays_weights_and_takes_groups(name: str) -> None:
    module = _module()
    groups = [{"params": "encoder.*", "learningRate": 0.5, "weightDecay": 0.25}]
    optimizer = build_optimizer(name, module, groups, learning_rate=0.1, weight_decay=0.0)
    assert [g["lr"] for g in optimizer.param_groups] == [0.5, 0.1]
    assert [g["weight_decay"] for g in optimizer.param_groups] == [0.25, 0.0]
    before = {name: p.detach().clone() for name, p in module.named_parameters()}
    for p in module.parameters():
        p.grad = torch.zeros_like(p)
    optimizer.step()
    # With no gradient at all, only what decays can move.
    moved = [n for n, p in module.named_parameters() if not p.equal(before[n])]
    assert moved == ["encoder.weight", "encoder.bias"]


def test_an_unknown_optimizer_names_the_nearest() -> None:
    with pytest.raises(
        ValueError, match=r"optimizer must be one of .* or a callable, got 'adamv'; did you mean 'adam"
    ):
        make_optimizer("adamv", [], 0.1, 0.0)


def test_the_first_match_wins_and_the_rest_comes_last() -> None:
    module = _module()
    groups = [
        {"params": ["*.bias", "norm.*"], "weightDecay": 0.0},
        {"params": "encoder.*", "learningRate": 1e-5},
    ]
    made = group_parameters(module, groups, learning_rate=0.1, weight_decay=0.01)
    names = {p: n for n, p in module.named_parameters()}
    assert [[names[p] for p in g["params"]] for g in made] == [
        ["encoder.bias", "norm.bias", "head.bias", "norm.weight"],
        ["encoder.weight"],
        ["head.weight"],
    ]
    assert [(g["lr"], g["weight_decay"]) for g in made] == [(0.1, 0.0), (1e-5, 0.01), (0.1, 0.01)]


def test_a_group_for_all_leaves_no_default_group_and_frozen_parameters_belong_to_none() -> None:
    module = _module()
    module.get_submodule("encoder").requires_grad_(False)
    (only,) = group_parameters(module, [{"params": "*"}], 0.1, 0.0)
    assert len(only["params"]) == 4
    with pytest.raises(ValueError, match=r"pattern 'encoder.\*', which matches no trainable parameter"):
        group_parameters(module, [{"params": "encoder.*"}])


def test_patterns_that_match_nothing_are_refused() -> None:
    module = _module()
    with pytest.raises(ValueError, match=r"parameterGroups\[0\] .*'haed.weight'.*did you mean 'head.weight'"):
        group_parameters(module, [{"params": "haed.weight"}])
    with pytest.raises(
        ValueError, match=r"parameterGroups\[1\] .*'head.bias'.* put the narrower pattern first"
    ):
        group_parameters(module, [{"params": "head.*"}, {"params": ["norm.*", "head.bias"]}])


@pytest.mark.parametrize(
    ("groups", "message"),
    [
        ({"params": "x"}, "must be a list of dicts, got dict"),
        ("x", "must be a list of dicts, got str"),
        (["x"], r"parameterGroups\[0\] must be a dict, got str"),
        ([{"params": "x", "lr": 0.1}], r"takes the keys .*got 'lr'"),
        ([{"params": "x", "learning_rate": 0.1}], r"got 'learning_rate'; did you mean 'learningRate'"),
        ([{"learningRate": 0.1}], r"parameterGroups\[0\] needs 'params', .* got None"),
        ([{"params": []}], "needs 'params'"),
        ([{"params": [1]}], "needs 'params'"),
        ([{"params": "x", "learningRate": 0}], "needs a learningRate above 0, got 0"),
        ([{"params": "x", "learningRate": float("nan")}], "needs a learningRate above 0, got nan"),
        ([{"params": "x", "weightDecay": -1}], "needs a weightDecay 0 or above, got -1"),
        ([{"params": "x", "weightDecay": True}], "needs a weightDecay 0 or above, got True"),
        ([{"params": "x", "weightDecay": "0"}], "needs a weightDecay 0 or above, got '0'"),
    ],
)
def test_malformed_groups_are_refused_in_one_sentence(groups: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        check_groups(groups)


def test_checked_groups_are_plain_json() -> None:
    groups = [{"params": "a.*", "learningRate": 1}, {"params": ("b", "c"), "weightDecay": 0}]
    checked = check_groups(groups)
    assert json.loads(json.dumps(checked)) == checked
    assert check_groups(checked) == checked
    assert checked[0] == {"params": ["a.*"], "learningRate": 1.0}


def test_a_factory_gets_parameters_or_groups_with_what_they_state_only() -> None:
    module = _module()
    given: list[Any] = []

    def factory(parameters: Any) -> torch.optim.Optimizer:
        given.append(parameters)
        return torch.optim.SGD(parameters, lr=0.7, weight_decay=0.3)

    assert build_optimizer(factory, module, None, 0.1, 0.2).param_groups[0]["lr"] == 0.7
    assert all(isinstance(p, nn.Parameter) for p in given[0])
    grouped = build_optimizer(factory, module, [{"params": "head.*", "learningRate": 0.5}], 0.1, 0.2)
    assert [(g["lr"], g["weight_decay"]) for g in grouped.param_groups] == [(0.5, 0.3), (0.7, 0.3)]


def test_a_factory_must_give_an_optimizer_of_the_modules_parameters() -> None:
    module, other = _module(), nn.Linear(2, 2)
    for factory, message in (
        (lambda p: "adam", "must return a torch.optim.Optimizer, got str"),
        (
            lambda p: torch.optim.SGD(other.parameters()),
            "must hold the parameters it was given, .* got others",
        ),
        (lambda p: torch.optim.SGD([*p, *other.parameters()]), "must hold the parameters it was given"),
        (lambda p: torch.optim.LBFGS(p), "LBFGS evaluates the loss several times a step"),
    ):
        with pytest.raises(ValueError, match=message):
            build_optimizer(factory, module, None, 0.1, 0.0)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch warns of it too
        with pytest.raises(ValueError, match="holds a parameter twice"):
            build_optimizer(lambda p: torch.optim.SGD([*p, p[0]]), module, None, 0.1, 0.0)


def test_a_factory_that_leaves_parameters_out_is_warned_of() -> None:
    module = _module()
    with pytest.warns(UserWarning, match=r"leaves out 4 trainable parameters; .*'encoder.weight'"):
        build_optimizer(lambda p: torch.optim.SGD(p[4:]), module, None, 0.1, 0.0)


FACTORIES = {
    "two groups": lambda p: torch.optim.AdamW([{"params": p[:2], "lr": 0.01}, {"params": p[2:]}], lr=0.05),
    "a first state": lambda p: torch.optim.Adagrad(p, lr=0.1, initial_accumulator_value=0.5),
    "momentum": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, nesterov=True),
    "left out": lambda p: torch.optim.SGD(p[2:], lr=0.1),
}


def _weights(collective: Collective, device: str, status: Status) -> str:
    """The weights after five steps over twelve rows dealt out to the ranks, for each factory."""
    warnings.filterwarnings("ignore", "optimizer leaves out")
    rows = torch.randn(5, 12, 3, generator=torch.Generator().manual_seed(1))
    result = {}
    for name, factory in FACTORIES.items():
        status.phase = name
        module = _module()
        sync = collective.synchronize(module, build_optimizer(factory, module, None, 0.1, 0.0), 1)
        scaler = torch.amp.GradScaler("cpu", enabled=False)
        for batch in rows:
            mine = batch[collective.rank :: collective.size]
            sync.optimizer.zero_grad()
            with sync.micro_batch(last=True):
                ((sync.module(mine) - 1).square().sum() / len(batch) * sync.loss_factor).backward()
            sync.reduce()
            sync.step(scaler)
        result[name] = torch.cat([p.detach().flatten() for p in module.parameters()]).tolist()
    return json.dumps(result)


@pytest.mark.distributed
@pytest.mark.parametrize("name", GANGS)
def test_what_a_factory_made_is_kept_on_several_ranks(name: str) -> None:
    expected = json.loads(_weights(LocalCollective(), "cpu", Status("here")))
    for text in run_spawned(2, name, _weights):
        for factory, weights in json.loads(text).items():
            assert weights == pytest.approx(expected[factory], abs=1e-5), factory


class NeedsArgument(torch.optim.SGD):
    def __init__(self, params: Any, scale: float) -> None:
        super().__init__(params, lr=scale)


def _foreign(collective: Collective, device: str, status: Status) -> str:
    module = _module()
    try:
        collective.synchronize(module, NeedsArgument(module.parameters(), 0.1), 1)
    except ValueError as error:
        return str(error)
    return "made"


@pytest.mark.distributed
def test_an_optimizer_that_horovod_cannot_make_anew_is_refused_with_the_remedy() -> None:
    (text,) = run_spawned(1, "horovod", _foreign)
    assert "optimizer NeedsArgument must be constructible from its parameter groups alone" in text
    assert "collective='torch'" in text
