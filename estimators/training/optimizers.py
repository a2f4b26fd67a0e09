"""Optimizers by name or by a factory, over one or several groups of parameters.

Made after the module has its final form. The learning rate is what the user wrote, for any number
of ranks.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from fnmatch import fnmatchcase
from inspect import Parameter, signature
from math import isfinite
from typing import Any

import torch
from torch import nn

from ringspark.estimators.training.names import check_name, nearest

Parameters = Iterable[nn.Parameter] | list[dict[str, Any]]
Factory = Callable[[Any, float, float], torch.optim.Optimizer]

# Name -> factory(parameters or groups, learning_rate, weight_decay); the rest is torch's default.
OPTIMIZERS: dict[str, Factory] = {
    "sgd": lambda p, lr, wd: torch.optim.SGD(p, lr=lr, weight_decay=wd),
    "momentum": lambda p, lr, wd: torch.optim.SGD(p, lr=lr, weight_decay=wd, momentum=0.9),
    "adam": lambda p, lr, wd: torch.optim.Adam(p, lr=lr, weight_decay=wd),
    "adamw": lambda p, lr, wd: torch.optim.AdamW(p, lr=lr, weight_decay=wd),
    "adamax": lambda p, lr, wd: torch.optim.Adamax(p, lr=lr, weight_decay=wd),
    "nadam": lambda p, lr, wd: torch.optim.NAdam(p, lr=lr, weight_decay=wd),
    "radam": lambda p, lr, wd: torch.optim.RAdam(p, lr=lr, weight_decay=wd),
    "rmsprop": lambda p, lr, wd: torch.optim.RMSprop(p, lr=lr, weight_decay=wd),
    "adagrad": lambda p, lr, wd: torch.optim.Adagrad(p, lr=lr, weight_decay=wd),
    "adadelta": lambda p, lr, wd: torch.optim.Adadelta(p, lr=lr, weight_decay=wd),
}

# Keys of one entry of `parameterGroups`, and torch.optim's names for them.
GROUP_KEYS = {"params": "params", "learningRate": "lr", "weightDecay": "weight_decay"}


def make_optimizer(
    name: str, parameters: Parameters, learning_rate: float, weight_decay: float
) -> torch.optim.Optimizer:
    """The optimizer registered as `name` over `parameters`, or over groups of them.

    Raises:
        ValueError: The name is unknown.
    """
    check_name("optimizer", name, OPTIMIZERS)
    return OPTIMIZERS[name](parameters, learning_rate, weight_decay)


def check_groups(groups: object) -> list[dict[str, Any]]:
    """Checks the form of `parameterGroups`; whether a pattern matches is asked of the module later.

    Args:
        groups: A list of dicts {"params": "encoder.*", "learningRate": 1e-5, "weightDecay": 0.0}.
            "params" is a pattern over names of parameters (as of the shell: *, ?, [...]) or a list
            of patterns; the other keys may be left out.

    Returns:
        The groups as plain JSON values, "params" always a list.

    Raises:
        ValueError: One sentence that names the group and the remedy.
    """
    if isinstance(groups, Mapping | str) or not isinstance(groups, Sequence):
        raise ValueError(f"parameterGroups must be a list of dicts, got {type(groups).__name__}")
    return [_check_group(index, group) for index, group in enumerate(groups)]


def _check_group(index: int, group: object) -> dict[str, Any]:
    if not isinstance(group, Mapping):
        raise ValueError(f"parameterGroups[{index}] must be a dict, got {type(group).__name__}")
    for key in group:
        if key not in GROUP_KEYS:
            raise ValueError(
                f"parameterGroups[{index}] takes the keys {list(GROUP_KEYS)}, "
                f"got {key!r}{nearest(str(key), GROUP_KEYS)}"
            )
    given = group.get("params")
    patterns = [given] if isinstance(given, str) else given
    if (
        not isinstance(patterns, Sequence)
        or not patterns
        or not all(isinstance(p, str) and p for p in patterns)
    ):
        raise ValueError(
            f"parameterGroups[{index}] needs 'params', a pattern over names of parameters "
            f"('encoder.*') or a list of patterns, got {given!r}"
        )
    checked: dict[str, Any] = {"params": list(patterns)}
    for key in ("learningRate", "weightDecay"):
        if key not in group:
            continue
        value = group[key]
        is_number = isinstance(value, int | float) and not isinstance(value, bool) and isfinite(value)
        if not is_number or value < 0 or (key == "learningRate" and value == 0):
            bound = "above 0" if key == "learningRate" else "0 or above"
            raise ValueError(f"parameterGroups[{index}] needs a {key} {bound}, got {value!r}")
        checked[key] = float(value)
    return checked


def group_parameters(
    module: nn.Module,
    groups: object,
    learning_rate: float | None = None,
    weight_decay: float | None = None,
) -> list[dict[str, Any]]:
    """Deals a module's trainable parameters out to groups, in torch.optim's form.

    The first group that matches a parameter gets it; those that none matches form a last group. A
    rate or decay that a group does not state is the one given here, and absent where that is None.

    Raises:
        ValueError: The groups are malformed, or a pattern matches no trainable parameter, or none
            that an earlier group has left.
    """
    named = {name: p for name, p in module.named_parameters() if p.requires_grad}
    defaults = {"lr": learning_rate, "weight_decay": weight_decay}
    defaults = {key: value for key, value in defaults.items() if value is not None}
    left = dict(named)
    result: list[dict[str, Any]] = []
    for index, group in enumerate(check_groups(groups)):
        own: list[nn.Parameter] = []
        earlier = dict(left)
        for pattern in group["params"]:
            _check_pattern(index, pattern, named, earlier)
            own += [left.pop(name) for name in list(left) if fnmatchcase(name, pattern)]
        stated = {GROUP_KEYS[key]: value for key, value in group.items() if key != "params"}
        result.append({"params": own, **defaults, **stated})
    if left:
        result.append({"params": list(left.values()), **defaults})
    return result


def _check_pattern(index: int, pattern: str, named: Iterable[str], left: Iterable[str]) -> None:
    if not any(fnmatchcase(name, pattern) for name in named):
        names = list(named)
        raise ValueError(
            f"parameterGroups[{index}] has the pattern {pattern!r}, which matches no trainable parameter"
            f"{nearest(pattern, names) or f'; they are {names[:10]}'}"
        )
    if not any(fnmatchcase(name, pattern) for name in left):
        raise ValueError(
            f"parameterGroups[{index}] has the pattern {pattern!r}, whose parameters all belong to an "
            "earlier group, and the first match wins; put the narrower pattern first"
        )


def build_optimizer(
    spec: str | Callable[[Any], torch.optim.Optimizer],
    module: nn.Module,
    groups: object,
    learning_rate: float,
    weight_decay: float,
) -> torch.optim.Optimizer:
    """The optimizer of a module in its final form. Runs on every rank.

    Args:
        spec: A name of `OPTIMIZERS`, or a factory. A factory gets the list of trainable parameters
            (without `groups`) or the list of group dicts, and decides rates and decays itself where a
            group does not state them.
        groups: See `check_groups`; empty or None for one group of all parameters.

    Raises:
        ValueError: The name is unknown, the groups do not fit the module, or the factory returned
            something else than an optimizer of this module's trainable parameters.
    """
    trainable = [p for p in module.parameters() if p.requires_grad]
    if isinstance(spec, str):
        grouped = group_parameters(module, groups, learning_rate, weight_decay) if groups else None
        return make_optimizer(spec, grouped or trainable, learning_rate, weight_decay)
    optimizer = spec(group_parameters(module, groups) if groups else list(trainable))
    _check_made(optimizer, module)
    return optimizer


def _check_made(optimizer: object, module: nn.Module) -> None:
    if not isinstance(optimizer, torch.optim.Optimizer):
        raise ValueError(
            f"optimizer must return a torch.optim.Optimizer, got {type(optimizer).__name__}; "
            "give a callable (parameters) -> optimizer"
        )
    closure = signature(optimizer.step).parameters.get("closure")
    if closure is not None and closure.default is Parameter.empty:
        raise ValueError(
            f"optimizer {type(optimizer).__name__} evaluates the loss several times a step, which the "
            "training loop does not offer; take one whose step() needs no closure"
        )
    names = {p: name for name, p in module.named_parameters() if p.requires_grad}
    held = [p for group in optimizer.param_groups for p in group["params"]]
    if len(set(held)) < len(held):
        raise ValueError("optimizer holds a parameter twice; give each parameter to one group")
    if any(p not in names for p in held) or not held:
        raise ValueError(
            f"optimizer must hold the parameters it was given, the {len(names)} trainable ones of "
            f"{type(module).__name__}, got others or none; make it from its argument"
        )
    missing = [name for p, name in names.items() if p not in set(held)]
    if missing:
        warnings.warn(
            f"optimizer leaves out {len(missing)} trainable parameters; they are not trained: {missing[:10]}",
            stacklevel=3,
        )


__all__ = [
    "GROUP_KEYS",
    "OPTIMIZERS",
    "build_optimizer",
    "check_groups",
    "check_name",
    "group_parameters",
    "make_optimizer",
]
