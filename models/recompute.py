"""A segment: a group of module calls that stores only its inputs, and runs again in the backward pass.

`checkpoint` of torch reruns one call and stores its inputs. A segment reruns several calls, also if the
network's own loop calls them: the calls share one of torch's checkpoint frames, which drops their saved
tensors and fills them again. The network's code between two calls is not rerun.

Autograd saves every tensor argument that comes from outside the segment. Hooks on saved tensors (offload,
compression) therefore get these arguments, and changing an argument in place raises an error. No node of the
graph refers to a later node, so a graph that is never used for a backward pass is freed at once.
"""

from __future__ import annotations

import ctypes
import pickle
import random
import re
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass, field
from functools import lru_cache, partial
from typing import Any, NoReturn

import numpy as np
import torch
import torch.utils.checkpoint as library
from torch import nn
from torch.nn.utils.stateless import _reparametrize_module
from torch.utils._pytree import tree_leaves, tree_map_only
from torch.utils.weak import WeakTensorKeyDictionary

# Hundreds of calls may store a state of 11 KB, so equal states are one object.
_share = lru_cache(maxsize=1)(bytes)


def _random_state() -> bytes:
    """Returns the state of the generators of `random`, NumPy and torch."""
    gpus = torch.cuda.get_rng_state_all() if torch.cuda.is_initialized() else []  # type: ignore[no-untyped-call]
    # Uses no torch operation, because a FLOP counter or the memory planner would count it.
    tensors = [ctypes.string_at(s.data_ptr(), s.numel()) for s in (torch.get_rng_state(), *gpus)]
    return _share(pickle.dumps((random.getstate(), np.random.get_state(), tensors)))


def _restore(state: bytes) -> None:
    python, numpy, tensors = pickle.loads(state)
    random.setstate(python)
    np.random.set_state(numpy)
    cpu, *gpus = (torch.frombuffer(bytearray(s), dtype=torch.uint8) for s in tensors)
    torch.set_rng_state(cpu)
    torch.cuda.set_rng_state_all(gpus)


@contextmanager
def keep_random_state() -> Iterator[None]:
    before = _random_state()
    try:
        yield
    finally:
        _restore(before)


class _Slot:
    """Placeholder for a tensor among the arguments of a call, or for a tensor that the call returned."""


def _autocast_contexts() -> list[AbstractContextManager[Any]]:
    devices = ["cpu", "cuda"] if torch.cuda.is_initialized() else ["cpu"]  # type: ignore[no-untyped-call]
    return [torch.autocast(d, torch.get_autocast_dtype(d), torch.is_autocast_enabled(d)) for d in devices]


@dataclass
class _Call:
    module: nn.Module
    run: Callable[..., Any]
    arguments: tuple[tuple[Any, ...], dict[str, Any]]
    random: bytes = field(default_factory=_random_state)
    autocast: list[AbstractContextManager[Any]] = field(default_factory=_autocast_contexts)
    # Values before the call of the buffers that it changed.
    buffers: dict[str, torch.Tensor] = field(default_factory=dict)
    outputs: list[_Slot] = field(default_factory=list)

    def run_first(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        before = {name: (b, b._version, b.detach().clone()) for name, b in self.module.named_buffers()}
        output = self.run(*args, **kwargs)
        after = dict(self.module.named_buffers())
        for name, (buffer, version, copy) in before.items():
            # Batch normalization does not change the version of its buffers. A rerun does not read them.
            if after.get(name) is not buffer or buffer._version != version:
                self.buffers[name] = copy
        return output

    def run_again(self, values: dict[_Slot, torch.Tensor]) -> None:
        args, kwargs = tree_map_only(_Slot, values.__getitem__, self.arguments)
        # Replaced, because writing into the buffers would fail autograd's version check on saved tensors.
        copies = {name: self.buffers.get(name, b).clone() for name, b in self.module.named_buffers()}
        _restore(self.random)
        with ExitStack() as stack:
            for context in (*self.autocast, _reparametrize_module(self.module, copies, tie_weights=True)):
                stack.enter_context(context)
            output = self.run(*args, **kwargs)
        values.update(zip(self.outputs, _tensors(output), strict=True))


# Slot -> (result of `_keep`, whether the kept tensor requires a gradient).
_Kept = dict[_Slot, tuple[torch.Tensor, bool]]


def _rerun(calls: Sequence[_Call], kept: _Kept) -> None:
    values = {
        slot: keeper.grad_fn.saved_tensors[0].detach().requires_grad_(requires_grad)  # type: ignore[union-attr]
        for slot, (keeper, requires_grad) in kept.items()
    }
    with keep_random_state():
        for call in calls:
            call.run_again(values)


def _explain(calls: Sequence[_Call], error: Exception) -> NoReturn:
    names = ", ".join(dict.fromkeys(type(call.module).__name__ for call in calls))
    raise RuntimeError(
        f"gradientCheckpointing: {names} must do the same when run again in the backward pass, but "
        f"{_difference(str(error))}; do not change a cache or other state in its forward, do not switch "
        "between train() and eval() before the backward pass, or name other modules"
    ) from error


def _difference(message: str) -> str:
    if found := re.search(r"position (\d+):\nsaved metadata: (.*)\nrecomputed metadata: (.*)", message):
        return f"saved tensor {found[1]} is {found[3]} instead of {found[2]}"
    if counts := re.findall(r"^Number of tensors saved during .*: (\d+)", message, re.MULTILINE):
        return f"saves {counts[1]} tensors instead of {counts[0]}"
    return message


class Segment:
    def __init__(self) -> None:
        calls: list[_Call] = []
        kept: _Kept = {}
        self._calls, self._kept = calls, kept
        self._known = WeakTensorKeyDictionary()  # tensor -> (version, slot)
        # The frame must not refer to the segment, which refers to the frame.
        frame = library._CheckpointFrame(
            partial(_rerun, calls, kept), True, partial(_explain, calls), library._default_meta_extractor
        )
        if hasattr(library, "_NoopSaveInputs"):  # torch before 2.13
            frame.input_saver = library._NoopSaveInputs.apply(torch.empty(0, requires_grad=True))  # type: ignore[attr-defined]
        self._hooks = library._checkpoint_hook(frame)

    def call(self, module: nn.Module, run: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        """Returns `run(*args, **kwargs)`, which calls `module`."""
        call = _Call(module, run, tree_map_only(torch.Tensor, self._slot, (args, kwargs)))
        self._calls.append(call)
        with self._hooks:
            output = call.run_first(args, kwargs)
        call.outputs = [self._new_slot(tensor) for tensor in _tensors(output)]
        return output

    def _slot(self, tensor: torch.Tensor) -> _Slot:
        version, slot = self._known.get(tensor, (None, None))  # type: ignore[no-untyped-call]
        # A tensor that was changed in place between two calls is kept, not recomputed.
        if version != tensor._version:
            slot = self._new_slot(tensor)
            self._kept[slot] = _keep(tensor), tensor.requires_grad
        return slot  # type: ignore[no-any-return]

    def _new_slot(self, tensor: torch.Tensor) -> _Slot:
        slot = _Slot()
        self._known[tensor] = tensor._version, slot
        return slot


class _Keep(torch.autograd.Function):
    """Saves a tensor in the autograd graph, so that hooks on saved tensors and version checks apply to it."""

    @staticmethod
    def forward(ctx: Any, anchor: torch.Tensor, tensor: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(tensor)
        return torch.empty(0)


def _keep(tensor: torch.Tensor) -> torch.Tensor:
    """Returns an empty tensor whose `grad_fn` saves `tensor`.

    Before torch 2.13, the node saves it only while the returned tensor is alive.
    """
    # Detached: otherwise the segment and the graph between its calls would refer to each other.
    detached = tensor if tensor.is_leaf else tensor.detach()
    return _Keep.apply(torch.empty(0, requires_grad=True), detached)  # type: ignore[no-any-return, no-untyped-call]


def _tensors(values: Any) -> list[torch.Tensor]:
    return [leaf for leaf in tree_leaves(values) if isinstance(leaf, torch.Tensor)]
