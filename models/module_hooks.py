"""Finds hooks on a module, which are lost or repeated where something else takes its place or its calls."""

from __future__ import annotations

from torch import nn

_KINDS = {
    "_forward_hooks": "a forward hook",
    "_forward_pre_hooks": "a forward pre-hook",
    "_backward_hooks": "a backward hook",
    "_backward_pre_hooks": "a backward pre-hook",
}


def find_hook(module: nn.Module) -> str | None:
    """Returns which hook or replaced `forward` the module itself has; None if its class alone runs."""
    if "forward" in vars(module):
        return "a forward of its own"
    return next((kind for name, kind in _KINDS.items() if getattr(module, name)), None)


def has_gradient_hook(module: nn.Module) -> bool:
    """Returns whether a hook runs when a parameter of the module gets its gradient."""
    return any(
        bool(parameter._backward_hooks or getattr(parameter, "_post_accumulate_grad_hooks", None))
        for parameter in module.parameters()
    )
