"""Optimizers by name. A factory makes them after the module has its final form."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from difflib import get_close_matches

import torch
from torch import nn

Factory = Callable[[Iterable[nn.Parameter], float, float], torch.optim.Optimizer]

# Name -> factory(parameters, learning_rate, weight_decay).
OPTIMIZERS: dict[str, Factory] = {
    "sgd": lambda p, lr, wd: torch.optim.SGD(p, lr=lr, weight_decay=wd),
    "momentum": lambda p, lr, wd: torch.optim.SGD(p, lr=lr, weight_decay=wd, momentum=0.9),
    "adam": lambda p, lr, wd: torch.optim.Adam(p, lr=lr, weight_decay=wd),
    "adamw": lambda p, lr, wd: torch.optim.AdamW(p, lr=lr, weight_decay=wd),
}


def check_name(kind: str, name: str, known: Iterable[str]) -> None:
    """Refuses a name outside `known` and points to the nearest one.

    Raises:
        ValueError: With the known names and the nearest.
    """
    names = sorted(known)
    if name not in names:
        near = get_close_matches(name, names, n=1)
        hint = f"; did you mean {near[0]!r}?" if near else ""
        raise ValueError(f"{kind} must be one of {names} or a callable, got {name!r}{hint}")


def make_optimizer(
    name: str, parameters: Iterable[nn.Parameter], learning_rate: float, weight_decay: float
) -> torch.optim.Optimizer:
    """The optimizer registered as `name` over `parameters`.

    Raises:
        ValueError: The name is unknown.
    """
    check_name("optimizer", name, OPTIMIZERS)
    return OPTIMIZERS[name](parameters, learning_rate, weight_decay)
