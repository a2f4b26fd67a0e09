"""Modules without their weights, and weights into modules: what travels is small, what is big is mapped.

A skeleton is a module whose parameters and persistent buffers lie on torch's `meta` device: shapes and
dtypes, no numbers. Buffers that no state dict holds (`persistent=False`) and plain attributes keep
their values, because no checkpoint could give them back. Tied weights stay one object.
"""

from __future__ import annotations

import copy
import threading
import weakref
from collections.abc import Mapping
from typing import Any, cast

import torch
from torch import nn
from torch.nn.modules.module import register_module_parameter_registration_hook
from torch.nn.parameter import is_lazy

from ringspark.models import ModelSpec


def skeleton(module: nn.Module) -> nn.Module:
    """A copy of the module without weights; no number of a parameter is copied on the way."""
    # deepcopy takes what it finds here for the copy of an object, wherever the object turns up.
    memo: dict[int, object] = {}
    for parameter in module.parameters():
        if not is_lazy(parameter):
            empty = torch.empty_like(parameter, device="meta")
            memo[id(parameter)] = nn.Parameter(empty, requires_grad=parameter.requires_grad)
    for owner in module.modules():
        for name, buffer in owner._buffers.items():
            if buffer is not None and name not in owner._non_persistent_buffers_set and not is_lazy(buffer):
                memo[id(buffer)] = torch.empty_like(buffer, device="meta")
    result: nn.Module = copy.deepcopy(module, memo)
    return result


def fill(module: nn.Module, state: Mapping[str, torch.Tensor]) -> None:
    """Puts the tensors of a state dict in the place of the module's own, without a copy.

    Each parameter stays the object that it is, so that tied weights stay tied and whoever else refers
    to one finds the numbers in it.

    Raises:
        RuntimeError: The state dict is not this module's; torch's own message.
    """
    dtypes = {name: tensor.dtype for name, tensor in module.state_dict().items()}
    cast = {
        name: tensor.to(dtypes[name]) if name in dtypes and tensor.dtype != dtypes[name] else tensor
        for name, tensor in state.items()
    }
    before = torch.__future__.get_swap_module_params_on_conversion()
    torch.__future__.set_swap_module_params_on_conversion(True)
    try:
        module.load_state_dict(cast, assign=True)
    finally:
        torch.__future__.set_swap_module_params_on_conversion(before)


def changed_state(start: nn.Module, trained: nn.Module) -> list[str]:
    """Names of the non-persistent buffers that a training has changed: no checkpoint holds them.

    Args:
        start: The module as it was; its `skeleton` will do, which copies such buffers and no weights.
        trained: The module now, on any device.
    """
    before, after = _non_persistent(start), _non_persistent(trained)
    return sorted(
        name for name in before.keys() | after.keys() if not _is_same(before.get(name), after.get(name))
    )


def _non_persistent(module: nn.Module) -> dict[str, torch.Tensor | None]:
    """Buffers that no state dict holds, by their full names."""
    return {
        f"{prefix}.{name}" if prefix else name: owner._buffers[name]
        for prefix, owner in module.named_modules()
        for name in owner._non_persistent_buffers_set
    }


def _is_same(first: torch.Tensor | None, second: torch.Tensor | None) -> bool:
    if first is None or second is None:
        return first is second
    if first.shape != second.shape or first.dtype != second.dtype:
        return False
    first, second = first.detach().cpu(), second.detach().cpu()
    # A NaN that stays one has not changed.
    return bool(((first == second) | ((first != first) & (second != second))).all())


def build_skeleton(spec: ModelSpec) -> nn.Module:
    """The spec's network without weights: no memory for them, no time to draw them at random."""
    mine = threading.get_ident()
    empty: dict[int, tuple[weakref.ref[nn.Parameter], nn.Parameter]] = {}

    def to_meta(module: nn.Module, name: str, parameter: nn.Parameter | None) -> nn.Parameter | None:
        # The hook is one for the process: networks that other threads build are not touched.
        if threading.get_ident() != mine or parameter is None or parameter.is_meta or is_lazy(parameter):
            return None
        known = empty.get(id(parameter))
        if known is None or known[0]() is not parameter:
            meta = nn.Parameter(torch.empty_like(parameter, device="meta"), parameter.requires_grad)
            known = empty[id(parameter)] = (weakref.ref(parameter), meta)
        return known[1]

    hook = register_module_parameter_registration_hook(cast(Any, to_meta))
    try:
        with torch.random.fork_rng(devices=[]):
            return spec.build()
    except Exception:
        # A constructor that looks at its own weights; whatever else is wrong is raised below.
        hook.remove()
        return skeleton(spec.build())
    finally:
        hook.remove()
