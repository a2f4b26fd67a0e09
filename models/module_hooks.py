"""Finds a module's hooks, and replaces its forward between them.

Code that replaces a module or wraps its calls would lose the hooks, or run them twice.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from torch import nn

_KINDS = {
    "_forward_hooks": "a forward hook",
    "_forward_pre_hooks": "a forward pre-hook",
    "_backward_hooks": "a backward hook",
    "_backward_pre_hooks": "a backward pre-hook",
}


def find_hook(module: nn.Module) -> str | None:
    if "forward" in vars(module):
        return "a replaced forward()"
    return next((kind for name, kind in _KINDS.items() if getattr(module, name)), None)


def has_gradient_hook(module: nn.Module) -> bool:
    return any(
        bool(parameter._backward_hooks or getattr(parameter, "_post_accumulate_grad_hooks", None))
        for parameter in module.parameters()
    )


@contextmanager
def replace_forward(module: nn.Module, forward: Callable[..., Any]) -> Iterator[None]:
    """Replaces the module's forward inside the context, so copies and pickles never hold it."""
    own = {name: value for name, value in vars(module).items() if name == "forward"}
    vars(module)["forward"] = forward
    try:
        yield
    finally:
        vars(module).pop("forward", None)
        vars(module).update(own)
