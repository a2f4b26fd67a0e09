"""A segment: a group of module calls that stores only its inputs, and runs again in the backward pass.

As in `torch.utils.checkpoint` (non-reentrant), a rerun stops once all tensors that autograd saved in the
forward pass are computed again. That function reruns one call, and stores its inputs. A segment reruns
several calls, also if the network's own loop calls them. The network's code between two calls is not rerun.

Autograd saves every tensor argument that comes from outside the segment. Hooks on saved tensors (offload,
compression) therefore get these arguments, and changing an argument in place raises an error. No node of the
graph refers to a later node, so a graph that is never used for a backward pass is freed at once.
"""

from __future__ import annotations

import contextlib
import ctypes
import random
import weakref
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.autograd.graph import saved_tensors_hooks
from torch.utils._pytree import tree_leaves, tree_map_only
from torch.utils.weak import WeakTensorKeyDictionary

Forward = Callable[..., Any]
Buffers = dict[tuple[nn.Module, str], torch.Tensor]
RandomStates = dict[str | torch.device, Any]  # "python", "numpy", "cpu" or a GPU -> state of its generator

# Hundreds of blocks may store a state, of 22 KB for `random`, so an unchanged state is the same object.
_latest: RandomStates = {}


def _random_states(tensors: Iterable[torch.Tensor]) -> RandomStates:
    """Returns the states of the generators of `random`, NumPy and torch on the devices of `tensors`."""
    states: RandomStates = {"python": random.getstate(), "cpu": torch.get_rng_state()}
    for name, state in states.items():
        if name in _latest and _memory(_latest[name]) == _memory(state):
            states[name] = _latest[name]
    # Copying NumPy's state takes 150 us, so its memory is compared first. It lacks the second normal number
    # of a pair, so `_HAS_GAUSS` is checked, too.
    generator, states["numpy"] = np.random.mtrand.get_bit_generator(), _latest.get("numpy")
    is_known = isinstance(generator, np.random.MT19937)
    memory = ctypes.string_at(generator.ctypes.state_address, 625 * 4) if is_known else b""
    if not memory or memory != _latest.get("memory") or states["numpy"][_HAS_GAUSS]:
        states["numpy"] = np.random.get_state()
    _latest.update({**states, "memory": memory})
    return states | {d: torch.cuda.get_rng_state(d) for d in {t.device for t in tensors if t.is_cuda}}


def _memory(state: Any) -> Any:
    # Uses no torch operation, because a FLOP counter or the memory planner would count it.
    return ctypes.string_at(state.data_ptr(), state.numel()) if isinstance(state, torch.Tensor) else state


_HAS_GAUSS = 3  # index in NumPy's state


def _restore(states: RandomStates) -> None:
    random.setstate(states["python"])
    np.random.set_state(states["numpy"])
    torch.set_rng_state(states["cpu"])
    for device, state in states.items():
        if isinstance(device, torch.device):
            torch.cuda.set_rng_state(state, device)


@contextlib.contextmanager
def keep_random_state(tensors: Iterable[torch.Tensor]) -> Iterator[None]:
    before = _random_states(tensors)
    try:
        yield
    finally:
        _restore(before)


def _buffers(module: nn.Module) -> Buffers:
    return {
        (owner, name): buffer
        for owner in module.modules()
        for name, buffer in owner._buffers.items()
        if buffer is not None
    }


@contextlib.contextmanager
def _replace_buffers(module: nn.Module, recorded: Buffers) -> Iterator[None]:
    """Replaces each buffer in a rerun by a copy of the recorded value (if none is recorded, the present one).

    The buffers are replaced, because writing into them would fail autograd's version check on saved tensors.
    """
    kept = _buffers(module)
    for (owner, name), buffer in kept.items():
        owner._buffers[name] = recorded.get((owner, name), buffer).clone()
    try:
        yield
    finally:
        for (owner, name), buffer in kept.items():
            owner._buffers[name] = buffer


class _Slot:
    """Placeholder for a tensor among the arguments of a call, or for a tensor that the call returned."""


@dataclass
class _Call:
    module: nn.Module
    forward: Forward
    arguments: tuple[tuple[Any, ...], dict[str, Any]]
    random: RandomStates
    autocast: list[torch.autocast]
    buffers: Buffers = field(default_factory=dict)  # values before the call of the buffers that it changed
    outputs: list[_Slot] = field(default_factory=list)

    def run_again(self, values: dict[_Slot, torch.Tensor], hooks: saved_tensors_hooks) -> None:
        args, kwargs = tree_map_only(_Slot, values.__getitem__, self.arguments)
        replaced = self.module.forward

        def forward(*args: Any, **kwargs: Any) -> Any:
            self.module.forward = replaced
            # Restored last, because a hook of the module may have drawn before the forward pass.
            _restore(self.random)
            with hooks, _replace_buffers(self.module, self.buffers):
                output = self.forward(*args, **kwargs)
            values.update(zip(self.outputs, _tensors(output), strict=True))
            return output

        self.module.forward = forward
        try:
            with contextlib.ExitStack() as stack:
                for autocast in self.autocast:
                    stack.enter_context(autocast)
                # With the module's hooks: fully sharded modules gather their parameters there.
                self.module(*args, **kwargs)
        finally:
            self.module.forward = replaced


class _Holder:
    """Placeholder in the autograd graph for a saved tensor."""

    value: torch.Tensor | None = None


class _Refilled(Exception):  # noqa: N818
    """Ends a rerun once all saved tensors are recomputed, because the rest of the module need not run."""


class Segment:
    def __init__(self) -> None:
        self._calls: list[_Call] = []
        self._known = WeakTensorKeyDictionary()  # tensor -> (version, slot)
        # Slot -> (result of `_keep`, whether the kept tensor requires a gradient).
        self._kept: dict[_Slot, tuple[torch.Tensor, bool]] = {}
        self._saved: list[tuple[weakref.ref[_Holder], str]] = []

    def call(self, module: nn.Module, forward: Forward, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        tensors = _tensors((args, kwargs))
        arguments = tree_map_only(torch.Tensor, self._slot, (args, kwargs))
        autocast = [
            torch.autocast(t, torch.get_autocast_dtype(t), torch.is_autocast_enabled(t))
            for t in sorted({"cpu"} | {tensor.device.type for tensor in tensors if tensor.is_cuda})
        ]
        call = _Call(module, forward, arguments, _random_states(tensors), autocast)
        self._calls.append(call)
        before = {key: (b, b._version, b.detach().clone()) for key, b in _buffers(module).items()}
        with saved_tensors_hooks(self._pack, self._unpack):
            output = forward(*args, **kwargs)
        after = _buffers(module)
        for key, (buffer, version, copy) in before.items():
            # Batch normalization does not change the version of its buffers. A rerun does not read them.
            if after.get(key) is not buffer or buffer._version != version:
                call.buffers[key] = copy
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

    def _pack(self, tensor: torch.Tensor) -> _Holder:
        holder = _Holder()
        self._saved.append((weakref.ref(holder), _description(tensor)))
        return holder

    def _unpack(self, holder: _Holder) -> torch.Tensor:
        if holder.value is None:
            self._run_again()
        value, holder.value = holder.value, None
        assert value is not None
        return value

    def _run_again(self) -> None:
        """Fills the placeholders of the forward pass, in order, with the tensors that a rerun saves."""
        values = {
            slot: keeper.grad_fn.saved_tensors[0].detach().requires_grad_(requires_grad)  # type: ignore[union-attr]
            for slot, (keeper, requires_grad) in self._kept.items()
        }
        saved, count = list(self._saved), 0
        difference = ""

        def refill(tensor: torch.Tensor) -> torch.Tensor:
            nonlocal count, difference
            if difference or count == len(saved):
                raise _Refilled
            value = tensor.detach() if tensor.requires_grad else tensor
            reference, before = saved[count]
            if _description(value) != before:
                difference = f"saved tensor {count} is {_description(value)} instead of {before}"
                raise _Refilled
            count += 1
            if (holder := reference()) is not None:
                holder.value = value
            if count == len(saved):
                raise _Refilled
            # A rerun may differentiate too, such as a network for forces.
            return value

        hooks = saved_tensors_hooks(refill, lambda tensor: tensor)
        with torch.enable_grad(), keep_random_state(list(values.values())), contextlib.suppress(_Refilled):
            for call in self._calls:
                call.run_again(values, hooks)
        if count < len(saved):
            names = ", ".join(dict.fromkeys(type(call.module).__name__ for call in self._calls))
            raise RuntimeError(
                f"gradientCheckpointing: {names} must do the same when run again in the backward pass, but "
                f"{difference or f'saves {count} tensors instead of {len(saved)}'}; do not change a cache or "
                "other state in its forward, do not switch between train() and eval() before the backward "
                "pass, or name other modules"
            )


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


def _description(tensor: torch.Tensor) -> str:
    return f"{tensor.dtype} {tuple(tensor.shape)} {tensor.device}"


def _tensors(values: Any) -> list[torch.Tensor]:
    return [leaf for leaf in tree_leaves(values) if isinstance(leaf, torch.Tensor)]
