"""Copies modules to the `meta` device, without weights; a checkpoint supplies the weights later.

Non-persistent buffers and plain attributes keep their values, because no checkpoint holds them. Tied weights
stay one object.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable, Mapping
from typing import Any, cast

import torch
from torch import nn
from torch.nn.modules.module import register_module_parameter_registration_hook
from torch.nn.parameter import is_lazy

from ringspark.models.network_copy import (
    copy_by_pickle,
    set_tensor_attributes,
    tensor_attributes,
    weight_storages,
)
from ringspark.models.process_state import PROCESS_LOCK, fork_generators


def copy_to_meta(module: nn.Module) -> nn.Module:
    return copy_module(module, empty=weight_storages(module))


def copy_module(module: nn.Module, **settings: Any) -> nn.Module:
    """Copies a network, also what ties its parts together; see `copy_by_pickle` for `settings`."""
    try:
        return copy_by_pickle(module, **settings)
    except MemoryError:
        raise
    except Exception as error:
        raise ValueError(
            f"model {type(module).__name__} cannot be copied: {error}; remove results, sessions, locks and "
            "open files from its attributes, or give its class as a ModelSpec"
        ) from error


def fill(module: nn.Module, state: Mapping[str, torch.Tensor]) -> None:
    """Replaces the module's tensors by the tensors of a state dict, without copying their data.

    Each tensor stays the same object, with its attributes and hooks, so tied weights stay tied.
    """
    given = [(tensor, tensor_attributes(tensor)) for tensor in (*module.parameters(), *module.buffers())]
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
            for tensor, attributes in given:
                set_tensor_attributes(tensor, attributes)


Buffers = dict[str, torch.Tensor | None]


def find_changed_buffers(before: Buffers, after: Buffers) -> list[str]:
    """Returns the names of the `unsaved_buffers` that a training changed."""
    return sorted(
        name for name in before.keys() | after.keys() if not _is_same(before.get(name), after.get(name))
    )


def unsaved_buffers(module: nn.Module) -> Buffers:
    """Copies the non-persistent buffers, which no checkpoint holds."""
    return {
        f"{prefix}.{name}" if prefix else name: None if (b := owner._buffers[name]) is None else b.clone()
        for prefix, owner in module.named_modules()
        for name in owner._non_persistent_buffers_set
    }


def _is_same(first: torch.Tensor | None, second: torch.Tensor | None) -> bool:
    if first is None or second is None:
        return first is second
    if first.shape != second.shape or first.dtype != second.dtype or first.layout != second.layout:
        return False
    pairs = list(zip(dense_parts(first), dense_parts(second), strict=True))
    # A NaN that is still a NaN has not changed.
    return all(a.shape == b.shape and bool(((a == b) | ((a != a) & (b != b))).all()) for a, b in pairs)


def dense_parts(tensor: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """Returns the tensor itself, or the indices and values of a sparse one; they share its memory."""
    tensor = tensor.detach()
    if tensor.layout == torch.sparse_coo:
        return tensor._indices(), tensor._values()
    if tensor.layout in (torch.sparse_csr, torch.sparse_bsr):
        return tensor.crow_indices(), tensor.col_indices(), tensor.values()
    if tensor.layout in (torch.sparse_csc, torch.sparse_bsc):
        return tensor.ccol_indices(), tensor.row_indices(), tensor.values()
    return (tensor,)


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
