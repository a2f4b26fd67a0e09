"""A segment: a group of module calls that stores only its inputs, and runs again in the backward pass.

As in `torch.utils.checkpoint` (non-reentrant), a rerun stops once all tensors that autograd saved in the
forward pass are computed again. The network's own code between two calls is not run again.

Autograd saves every tensor argument that comes from outside the segment. Hooks on saved tensors (offload,
compression) therefore get these arguments, and changing an argument in place raises an error. No node of the
graph refers to a later node, so a graph that is never used for a backward pass is freed at once.
"""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn
from torch.autograd.graph import saved_tensors_hooks
from torch.utils._pytree import TreeSpec, tree_flatten, tree_leaves, tree_unflatten

from ringspark.models.recompute.random_state import RandomState, current_state, keep_random_state

Forward = Callable[..., Any]
Key = tuple[str, str]  # (path of the submodule, name of the buffer)
Values = dict[Key, torch.Tensor]


class MovingBuffers:
    """Learns which buffers a module's forward pass changes, and copies only these buffers before each pass.

    A change shows in autograd's version counter. Batch normalization changes its buffers without increasing
    the counter. In training it does not read them, so a rerun needs no copies of them.
    """

    def __init__(self) -> None:
        self._moving: set[Key] | None = None

    @contextlib.contextmanager
    def record(self, module: nn.Module) -> Iterator[Values]:
        """Yields a dict during a forward pass; afterwards, the dict has the old values of changed buffers."""
        recorded: Values = {}
        before = _buffers(module)
        versions = {key: buffer._version for key, buffer in before.items()}
        wanted = before.keys() if self._moving is None else self._moving & before.keys()
        copies = {key: before[key].detach().clone() for key in wanted}
        try:
            yield recorded
        finally:
            after = _buffers(module)
            moved = {
                key
                for key, buffer in before.items()
                if after.get(key) is not buffer or buffer._version != versions[key]
            }
            self._moving = (self._moving or set()) | moved
            recorded |= {key: copies[key] for key in moved & copies.keys()}


@contextlib.contextmanager
def replace_buffers(module: nn.Module, recorded: Values) -> Iterator[None]:
    """Replaces each buffer in a rerun by a copy of the recorded value (if none is recorded, the present one).

    The buffers are replaced, because writing into them would fail autograd's version check on saved tensors.
    """
    kept = [(path, owner, dict(owner._buffers)) for path, owner in module.named_modules() if owner._buffers]
    for path, owner, buffers in kept:
        for name, buffer in buffers.items():
            if buffer is not None:
                was = recorded.get((path, name))
                owner._buffers[name] = (buffer if was is None else was).clone()
    try:
        yield
    finally:
        for _, owner, buffers in kept:
            owner._buffers.update(buffers)


def _buffers(module: nn.Module) -> Values:
    return {
        (path, name): buffer
        for path, owner in module.named_modules()
        for name, buffer in owner._buffers.items()
        if buffer is not None
    }


@dataclass(frozen=True)
class _Slot:
    """Placeholder for a tensor among the arguments of a call."""

    number: int


@dataclass(kw_only=True)
class _Call:
    """A recorded call of a module.

    Attributes:
        arguments: Flattened (args, kwargs), with a `_Slot` in place of each tensor.
        random: States of the random generators before the call. A state is None if a rerun need not restore
            it after the previous call.
        autocast: (device type, enabled, dtype) of autocast for each device type.
        outputs: Slot number of each value in the flattened return value; None if the value is not a tensor.
    """

    module: nn.Module
    forward: Forward
    arguments: list[Any]
    spec: TreeSpec
    random: RandomState
    autocast: list[tuple[str, bool, torch.dtype]]
    buffers: Values = field(default_factory=dict)
    outputs: list[int | None] = field(default_factory=list)


class _Holder:
    """Placeholder in the autograd graph for a saved tensor."""

    __slots__ = ("__weakref__", "segment", "value")

    def __init__(self, segment: Segment) -> None:
        self.segment = segment
        self.value: torch.Tensor | None = None


class Segment:
    def __init__(self) -> None:
        self._calls: list[_Call] = []
        self._num_slots = 0
        # id of a tensor -> (tensor, version, slot), while the tensor lives and is unchanged
        self._known: dict[int, tuple[weakref.ref[torch.Tensor], int, int]] = {}
        # Slot -> (tensor whose graph node saves the kept tensor, whether that one requires a gradient).
        self._kept: dict[int, tuple[torch.Tensor, bool]] = {}
        self._used: set[int] = set()
        self._holders: list[weakref.ref[_Holder]] = []
        self._saved: list[tuple[Any, ...]] = []
        self._random: RandomState | None = None

    def call(
        self,
        module: nn.Module,
        forward: Forward,
        buffers: MovingBuffers,
        args: Sequence[Any],
        kwargs: Mapping[str, Any],
    ) -> Any:
        leaves, spec = tree_flatten((tuple(args), dict(kwargs)))
        tensors = [leaf for leaf in leaves if isinstance(leaf, torch.Tensor)]
        random = current_state(tensors)
        device_types = sorted({"cpu"} | {tensor.device.type for tensor in tensors if tensor.is_cuda})
        call = _Call(
            module=module,
            forward=forward,
            arguments=[self._argument(leaf) for leaf in leaves],
            spec=spec,
            random=random.since(self._random),
            autocast=[(t, torch.is_autocast_enabled(t), torch.get_autocast_dtype(t)) for t in device_types],
        )
        self._calls.append(call)
        with buffers.record(module) as call.buffers, saved_tensors_hooks(self._pack, _unpack):
            output = forward(*args, **kwargs)
        call.outputs = [
            self._new_slot(leaf) if isinstance(leaf, torch.Tensor) else None for leaf in tree_leaves(output)
        ]
        # Most calls draw dropout from torch; the next call need not store this state again.
        self._random = random.now_of_torch()
        return output

    def close(self) -> None:
        self._known.clear()
        self._random = None

    def _argument(self, leaf: Any) -> Any:
        if not isinstance(leaf, torch.Tensor):
            return leaf
        known, version, slot = self._known.get(id(leaf), (None, 0, 0))
        # A tensor that was changed in place between two calls is kept, not recomputed.
        if known is None or known() is not leaf or version != leaf._version:
            slot = self._new_slot(leaf)
            self._kept[slot] = _keep(leaf), leaf.requires_grad
        self._used.add(slot)
        return _Slot(slot)

    def _new_slot(self, tensor: torch.Tensor) -> int:
        slot = self._num_slots
        self._num_slots += 1
        self._known[id(tensor)] = weakref.ref(tensor), tensor._version, slot
        return slot

    def _pack(self, tensor: torch.Tensor) -> _Holder:
        holder = _Holder(self)
        self._holders.append(weakref.ref(holder))
        self._saved.append(_description(tensor))
        return holder

    def run_again(self) -> None:
        values = {
            slot: keeper.grad_fn.saved_tensors[0].detach().requires_grad_(requires_grad)  # type: ignore[union-attr]
            for slot, (keeper, requires_grad) in self._kept.items()
        }
        refill = _Refill(self._holders, self._saved)
        with torch.enable_grad(), keep_random_state(list(values.values())), contextlib.suppress(_AllRefilled):
            for call in self._calls:
                self._run_call_again(call, values, refill)
        refill.check_complete(self._calls)

    def _run_call_again(self, call: _Call, values: dict[int, torch.Tensor], refill: _Refill) -> None:
        leaves = [values[leaf.number] if isinstance(leaf, _Slot) else leaf for leaf in call.arguments]
        args, kwargs = tree_unflatten(leaves, call.spec)

        def forward() -> Any:
            # Restored last, because a hook of the module may have drawn before the forward pass.
            call.random.restore()
            hooks = saved_tensors_hooks(refill.pack, lambda tensor: tensor)
            with hooks, replace_buffers(call.module, call.buffers):
                output = call.forward(*args, **kwargs)
            for slot, leaf in zip(call.outputs, tree_leaves(output), strict=True):
                if slot in self._used:
                    values[slot] = leaf
            return output

        token = _AGAIN.set((call.module, forward))
        try:
            with contextlib.ExitStack() as stack:
                for device_type, enabled, dtype in call.autocast:
                    stack.enter_context(torch.autocast(device_type, dtype=dtype, enabled=enabled))
                # With the module's hooks: fully sharded modules gather their parameters there.
                call.module(*args, **kwargs)
        finally:
            _AGAIN.reset(token)


# The module that is about to run again, and the function that its forward must call.
_AGAIN: ContextVar[tuple[nn.Module, Forward] | None] = ContextVar("_AGAIN", default=None)


def take_rerun(module: nn.Module) -> Forward | None:
    """Returns the function that `module.forward` must call in a rerun of the module; None in other calls."""
    pending = _AGAIN.get()
    if pending is None or pending[0] is not module:
        return None
    _AGAIN.set(None)
    return pending[1]


def _unpack(holder: _Holder) -> torch.Tensor:
    if holder.value is None:
        holder.segment.run_again()
    value, holder.value = holder.value, None
    assert value is not None
    return value


class _AllRefilled(Exception):  # noqa: N818
    """Ends a rerun once all saved tensors are recomputed, because the rest of the module need not run."""


class _Refill:
    """Fills the placeholders of the first forward pass, in order, with the tensors that a rerun saves."""

    def __init__(self, holders: Sequence[weakref.ref[_Holder]], saved: Sequence[tuple[Any, ...]]) -> None:
        self._holders = list(holders)
        self._saved = list(saved)
        self._count = 0
        self._difference = ""

    def pack(self, tensor: torch.Tensor) -> torch.Tensor:
        index = self._count
        if index == len(self._holders):
            raise _AllRefilled
        self._count += 1
        value = tensor.detach() if tensor.requires_grad else tensor
        if _description(value) != self._saved[index]:
            now, before = (" ".join(map(str, d)) for d in (_description(value), self._saved[index]))
            self._difference = f"saved tensor {index} is {now} instead of {before}"
            raise _AllRefilled
        holder = self._holders[index]()
        if holder is not None:
            holder.value = value
        if self._count == len(self._holders):
            raise _AllRefilled
        # A rerun may differentiate too, such as a network for forces.
        return value

    def check_complete(self, calls: Sequence[_Call]) -> None:
        if not self._difference and self._count < len(self._holders):
            self._difference = f"saves {self._count} tensors instead of {len(self._holders)}"
        if self._difference:
            names = ", ".join(dict.fromkeys(type(call.module).__name__ for call in calls))
            raise RuntimeError(
                f"gradientCheckpointing: {names} must do the same when run again in the backward pass, but "
                f"{self._difference}; do not change a cache or other state in its forward, do not switch "
                "between train() and eval() before the backward pass, or name other modules"
            )


class _Keep(torch.autograd.Function):
    """Saves a tensor in the autograd graph, so that hooks on saved tensors and version checks apply to it."""

    @staticmethod
    def forward(ctx: Any, anchor: torch.Tensor, tensor: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(tensor)
        return torch.empty(0)


def _keep(tensor: torch.Tensor) -> torch.Tensor:
    """Returns an empty tensor whose `grad_fn`, a node of the graph, saves `tensor`.

    The caller must keep the empty tensor: before torch 2.13, a node frees its saved tensors once no tensor
    refers to the node, even if a Python variable refers to the node.
    """
    # Detached: otherwise the segment and the graph between its calls would refer to each other.
    anchor = torch.empty(0, requires_grad=True)
    keeper: torch.Tensor = _Keep.apply(anchor, tensor if tensor.is_leaf else tensor.detach())  # type: ignore[no-untyped-call]
    return keeper


def _description(tensor: torch.Tensor) -> tuple[Any, ...]:
    return tensor.dtype, tuple(tensor.shape), tensor.device
