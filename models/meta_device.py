"""Copies modules to the `meta` device, without weights; a checkpoint supplies the weights later.

Non-persistent buffers and plain attributes keep their values, because no checkpoint holds them. Tied weights
stay one object.
"""

from __future__ import annotations

import copy
import threading
import weakref
from collections.abc import Callable, Mapping
from typing import Any, cast

import torch
from torch import nn
from torch.nn.modules.module import register_module_parameter_registration_hook
from torch.nn.parameter import is_lazy

from ringspark.models.process_state import PROCESS_LOCK, fork_generators


def copy_to_meta(module: nn.Module) -> nn.Module:
    # deepcopy uses these entries as finished copies.
    memo: dict[int, object] = {}
    for parameter in module.parameters():
        if not is_lazy(parameter):
            empty = torch.empty_like(parameter, device="meta")
            memo[id(parameter)] = nn.Parameter(empty, requires_grad=parameter.requires_grad)
    for owner in module.modules():
        for name, buffer in owner._buffers.items():
            if buffer is not None and name not in owner._non_persistent_buffers_set and not is_lazy(buffer):
                memo[id(buffer)] = torch.empty_like(buffer, device="meta")
    return copy_module(module, memo)


def copy_module(module: nn.Module, memo: dict[int, object] | None = None) -> nn.Module:
    try:
        result: nn.Module = copy.deepcopy(module, memo)
    except MemoryError:
        raise
    except Exception as error:
        raise ValueError(
            f"model {type(module).__name__} cannot be copied: {error}; remove results, sessions, locks and "
            "open files from its attributes"
        ) from error
    return result


def fill(module: nn.Module, state: Mapping[str, torch.Tensor]) -> None:
    """Replaces the module's tensors by the tensors of a state dict, without copying their data.

    Each parameter stays the same object, so tied weights stay tied.
    """
    dtypes = {name: tensor.dtype for name, tensor in module.state_dict().items()}
    cast = {
        name: tensor.to(dtypes[name]) if name in dtypes and tensor.dtype != dtypes[name] else tensor
        for name, tensor in state.items()
    }
    recurrent = [layer for layer in module.modules() if isinstance(layer, nn.RNNBase)]
    for layer in recurrent:
        # RNNs keep weak references to their weights, and torch cannot swap a tensor that has one.
        layer._flat_weight_refs = []
    with PROCESS_LOCK:
        before = torch.__future__.get_swap_module_params_on_conversion()
        torch.__future__.set_swap_module_params_on_conversion(True)
        try:
            module.load_state_dict(cast, assign=True)
        finally:
            torch.__future__.set_swap_module_params_on_conversion(before)
            for layer in recurrent:
                layer._init_flat_weights()


def find_changed_buffers(start: nn.Module, trained: nn.Module) -> list[str]:
    """Returns the names of the non-persistent buffers that a training changed; no checkpoint holds them.

    `start` is the module before the training. It may also be the module's `copy_to_meta`, which keeps the
    values of these buffers.
    """
    before, after = _non_persistent(start), _non_persistent(trained)
    return sorted(
        name for name in before.keys() | after.keys() if not _is_same(before.get(name), after.get(name))
    )


def _non_persistent(module: nn.Module) -> dict[str, torch.Tensor | None]:
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
    # A NaN that is still a NaN has not changed.
    return bool(((first == second) | ((first != first) & (second != second))).all())


def build_on_meta(build: Callable[[], nn.Module]) -> nn.Module:
    """Calls `build` and returns its network on `meta`; uses no memory or random numbers for the weights."""
    mine = threading.get_ident()
    empty: dict[int, tuple[weakref.ref[nn.Parameter], nn.Parameter]] = {}

    def to_meta(module: nn.Module, name: str, parameter: nn.Parameter | None) -> nn.Parameter | None:
        # The hook applies to the whole process, but must not change networks that other threads build.
        if threading.get_ident() != mine or parameter is None or parameter.is_meta or is_lazy(parameter):
            return None
        known = empty.get(id(parameter))
        if known is None or known[0]() is not parameter:
            meta = nn.Parameter(torch.empty_like(parameter, device="meta"), parameter.requires_grad)
            known = empty[id(parameter)] = (weakref.ref(parameter), meta)
        return known[1]

    hook = register_module_parameter_registration_hook(cast(Any, to_meta))
    try:
        with fork_generators():
            try:
                return build()
            except Exception:
                # The constructor probably read its weights, so build them. Other errors are raised again.
                hook.remove()
                return copy_to_meta(build())
    finally:
        hook.remove()
