"""Saves and restores all random generators, so that a rerun of a forward pass draws the same numbers."""

from __future__ import annotations

import contextlib
import ctypes
import random
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch

Cuda = dict[torch.device, torch.Tensor]


@dataclass(frozen=True, eq=False)
class RandomState:
    """States of the generators of `random`, NumPy and torch.

    None means that the state need not be restored.
    """

    python: tuple[Any, ...] | None
    numpy: tuple[Any, ...] | None
    cpu: torch.Tensor | None
    cuda: Cuda | None

    def since(self, other: RandomState | None) -> RandomState:
        """Returns a copy in which a state is None if it has not changed since `other` (the same object)."""
        if other is None:
            return self
        names = ("python", "numpy", "cpu", "cuda")
        return replace(self, **{n: None for n in names if getattr(self, n) is getattr(other, n)})

    def now_of_torch(self) -> RandomState:
        cpu, cuda = _torch_state(self.cuda or (), self)
        return replace(self, cpu=cpu, cuda=cuda)

    def restore(self) -> None:
        if self.python is not None:
            random.setstate(self.python)
        if self.numpy is not None:
            np.random.set_state(self.numpy)
        if self.cpu is not None:
            torch.set_rng_state(self.cpu)
        for device, state in (self.cuda or {}).items():
            torch.cuda.set_rng_state(state, device)


# The last state, and NumPy's raw memory. An unchanged state is returned as the same object: Python's state
# takes 22 KB, so states of some hundred blocks could outweigh the memory saved.
_latest: RandomState | None = None
_latest_numpy_bytes = b""


def current_state(tensors: Iterable[torch.Tensor]) -> RandomState:
    global _latest
    last = _latest
    python: tuple[Any, ...] | None = random.getstate()
    if last is not None and last.python == python:
        python = last.python
    cpu, cuda = _torch_state({tensor.device for tensor in tensors if tensor.is_cuda}, last)
    _latest = now = RandomState(python, _numpy_state(), cpu, cuda)
    return now


@contextlib.contextmanager
def keep_random_state(tensors: Iterable[torch.Tensor]) -> Iterator[None]:
    before = current_state(tensors)
    try:
        yield
    finally:
        before.restore()


def _torch_state(devices: Iterable[torch.device], last: RandomState | None) -> tuple[torch.Tensor, Cuda]:
    """Returns the states of torch's generators.

    Returns the same objects as in `last` if nothing has changed.
    """
    cpu, cuda = torch.get_rng_state(), {device: torch.cuda.get_rng_state(device) for device in devices}
    if last is not None and last.cpu is not None and _same_tensors(last.cpu, cpu):
        cpu = last.cpu
    if last is not None and last.cuda is not None and _same_cuda(last.cuda, cuda):
        cuda = last.cuda
    return cpu, cuda


def _numpy_state() -> tuple[Any, ...]:
    """Returns NumPy's state. Returns the same object as before if nothing has changed.

    Copying NumPy's state takes some 100 us, so the raw memory is compared first. NumPy draws normal numbers
    in pairs and caches the second one, which the raw memory does not show. A state with a cached number is
    therefore always copied.
    """
    global _latest_numpy_bytes
    generator = np.random.mtrand.get_bit_generator()
    memory = b""
    if isinstance(generator, np.random.MT19937):
        memory = ctypes.string_at(generator.ctypes.state_address, _MT19937_BYTES)
        if _latest is not None and memory == _latest_numpy_bytes and not _latest.numpy[_HAS_GAUSS]:  # type: ignore[index]
            return _latest.numpy  # type: ignore[return-value]
    state: Any = np.random.get_state()
    if _latest is not None and _latest.numpy is not None:
        (name, keys, *position), (last_name, last_keys, *last_position) = state, _latest.numpy
        if (name, position) == (last_name, last_position) and np.array_equal(keys, last_keys):
            state = _latest.numpy
    _latest_numpy_bytes = memory
    return state  # type: ignore[no-any-return]


_MT19937_BYTES = 624 * 4 + 4  # the key and the position in it
_HAS_GAUSS = 3  # index in `get_state` of the flag for a cached normal number


def _same_tensors(first: torch.Tensor, second: torch.Tensor) -> bool:
    # Without an operation of torch: a FLOP counter or the memory planner would count it as the network's.
    return first.numel() == second.numel() and _memory(first) == _memory(second)


def _same_cuda(first: Cuda, second: Cuda) -> bool:
    return first.keys() == second.keys() and all(_same_tensors(first[d], second[d]) for d in first)


def _memory(state: torch.Tensor) -> bytes:
    return ctypes.string_at(state.data_ptr(), state.numel())  # uint8
