"""A segment: consecutive module calls that store only their first inputs, and run again in the backward pass.

Each call is one `torch.utils.checkpoint`. It stores no tensor that an earlier call of its segment received or
returned: if the backward pass needs the call, the earlier calls run again first, and provide these tensors.
The network's code between two calls is not rerun. A call refers only to earlier calls, so a graph that is
never used for a backward pass is freed at once.
"""

from __future__ import annotations

import ctypes
import pickle
import random
import re
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.autograd.graph import saved_tensors_hooks
from torch.nn.utils.stateless import _reparametrize_module
from torch.utils._pytree import TreeSpec, tree_flatten, tree_leaves, tree_unflatten
from torch.utils.checkpoint import CheckpointError, checkpoint
from torch.utils.weak import WeakTensorKeyDictionary

Buffers = dict[str, torch.Tensor]

# Hundreds of calls may store a state of 11 KB, so equal states are one object.
_share = lru_cache(maxsize=1)(bytes)


def _random_state() -> bytes:
    """Returns the state of the generators of `random`, NumPy and torch."""
    gpus = torch.cuda.get_rng_state_all() if torch.cuda.is_initialized() else []
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


@contextmanager
def _record_changes(module: nn.Module, changed: Buffers) -> Iterator[None]:
    """Adds the buffers that the context changes to `changed`, with their earlier values."""
    before = {name: (b, b._version, b.detach().clone()) for name, b in module.named_buffers()}
    yield
    for name, (buffer, version, copy) in before.items():
        # Batch normalization does not change the version of its buffers. A rerun does not read them.
        if buffer._version != version or dict(module.named_buffers()).get(name) is not buffer:
            changed[name] = copy


def _replace_buffers(module: nn.Module, changed: Buffers) -> AbstractContextManager[None]:
    """Replaces each buffer in a rerun by a copy of the recorded value (if none is recorded, the present one).

    The buffers are replaced, because writing into them would fail autograd's version check on saved tensors.
    """
    copies = {name: changed.get(name, buffer).clone() for name, buffer in module.named_buffers()}
    return _reparametrize_module(module, copies, tie_weights=True)


def _explain(name: str) -> saved_tensors_hooks:
    """Returns the hooks of the checkpoint around the caller, with an error that names the module."""
    pack, unpack = torch._C._autograd._top_saved_tensors_default_hooks(True)

    def unpack_or_explain(packed: Any) -> Any:
        try:
            return unpack(packed)
        except CheckpointError as error:
            raise RuntimeError(
                f"gradientCheckpointing: {name} must do the same when run again in the backward pass, but "
                f"{_difference(str(error))}; do not change a cache or other state in its forward, do not "
                "switch between train() and eval() before the backward pass, or name other modules"
            ) from error

    return saved_tensors_hooks(pack, unpack_or_explain)


def _difference(message: str) -> str:
    if found := re.search(r"position (\d+):\nsaved metadata: (.*)\nrecomputed metadata: (.*)", message):
        return f"saved tensor {found[1]} is {found[3]} instead of {found[2]}"
    if counts := re.findall(r"^Number of tensors saved during .*: (\d+)", message, re.MULTILINE):
        return f"saves {counts[1]} tensors instead of {counts[0]}"
    return message


class _Slot:
    """Placeholder for a tensor that a call of the segment received or returned."""


_RUNNING = _Slot()  # among the values while calls run again


@dataclass
class _Call:
    module: nn.Module
    run: Callable[..., Any]
    inputs: tuple[Any, Any] | None  # positional and keyword arguments; None after the forward pass
    tree: TreeSpec
    kept: list[_Slot | None]  # slots of the stored leaves of the arguments
    values: dict[_Slot, Any]  # of the segment's slots, only while calls run again
    earlier: tuple[torch.Tensor, ...] | None  # anchors of the segment's earlier calls
    random: bytes = field(default_factory=_random_state)
    changed: Buffers = field(default_factory=dict)
    outputs: list[_Slot] = field(default_factory=list)

    def __call__(self, *stored: Any) -> tuple[Any, torch.Tensor | None]:
        """Returns the output, and an anchor: reading the tensor that it saves reruns the call to the end."""
        if self.inputs is None:
            output = self._run_again(stored)
        else:
            (args, kwargs), self.inputs = self.inputs, None
            with _record_changes(self.module, self.changed), _explain(type(self.module).__name__):
                output = self.run(*args, **kwargs)
        return output, None if self.earlier is None else torch.zeros(0, requires_grad=True).sin()

    def _run_again(self, stored: Sequence[Any]) -> Any:
        with ExitStack() as stack:
            if not self.values:
                stack.callback(self.values.clear)
                self.values[_RUNNING] = True
                for anchor in self.earlier or ():
                    _ = anchor.grad_fn._saved_self  # type: ignore[union-attr]
            self.values.update((slot, leaf) for slot, leaf in zip(self.kept, stored, strict=True) if slot)
            leaves = [self.values[leaf] if isinstance(leaf, _Slot) else leaf for leaf in stored]
            args, kwargs = tree_unflatten(leaves, self.tree)
            stack.enter_context(keep_random_state())
            stack.enter_context(_replace_buffers(self.module, self.changed))
            _restore(self.random)
            output = self.run(*args, **kwargs)
            self.values.update(zip(self.outputs, _tensors(output), strict=True))
            return output


class Segment:
    def __init__(self, is_single: bool = False) -> None:
        self._known = WeakTensorKeyDictionary()  # tensor -> (version, slot)
        self._values: dict[_Slot, Any] = {}
        self._anchors: tuple[torch.Tensor, ...] | None = None if is_single else ()

    def call(self, module: nn.Module, run: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        """Returns `run(*args, **kwargs)`, which calls `module`."""
        leaves, tree = tree_flatten((args, kwargs))
        stored = [self._find(leaf) or leaf for leaf in leaves]
        kept = [self._add(leaf) if isinstance(leaf, torch.Tensor) else None for leaf in stored]
        call = _Call(module, run, (args, kwargs), tree, kept, self._values, self._anchors)
        output, anchor = checkpoint(call, *stored, use_reentrant=False, preserve_rng_state=False)
        call.outputs = [self._add(tensor) for tensor in _tensors(output)]
        if self._anchors is not None:
            self._anchors = *self._anchors, anchor
        return output

    def _find(self, leaf: Any) -> _Slot | None:
        """Returns the slot of a known tensor, unless it was changed in place since."""
        known = self._known.get(leaf) if isinstance(leaf, torch.Tensor) else None  # type: ignore[no-untyped-call]
        return known[1] if known and known[0] == leaf._version else None

    def _add(self, tensor: torch.Tensor) -> _Slot:
        slot = _Slot()
        self._known[tensor] = tensor._version, slot
        return slot


def _tensors(values: Any) -> list[torch.Tensor]:
    return [leaf for leaf in tree_leaves(values) if isinstance(leaf, torch.Tensor)]
