"""Restores a user's network after the driver has run it, so that the workers get the original state."""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from types import FunctionType, MethodType, ModuleType
from typing import Any

import numpy as np
import torch
from torch import nn

from ringspark.models.network_copy import restore


@contextmanager
def untouched(module: nn.Module, twin: nn.Module | None = None) -> Iterator[None]:
    """Restores the network after the block: modes, gradients, buffers, and the objects in its attributes.

    Restores the weights only if `twin`, a copy of the network, is given. The function makes no copy of the
    weights itself, because a second copy could need too much memory.
    """
    gradients = [(parameter, parameter.grad) for parameter in module.parameters()]
    undos = list(_undos(module, {}))
    for parameter, _ in gradients:
        parameter.grad = None
    try:
        yield
    finally:
        with torch.no_grad():
            for undo in undos:
                undo()
            pairs = () if twin is None else zip(module.parameters(), twin.parameters(), strict=True)
            for parameter, kept in pairs:
                restore(parameter, kept)
        for parameter, gradient in gradients:
            parameter.grad = gradient


def _undos(value: Any, seen: dict[int, object]) -> Iterator[Callable[[], object]]:
    """Yields functions that restore `value` and the objects in it, outer objects first."""
    if id(value) in seen or isinstance(value, nn.Parameter):
        return
    seen[id(value)] = value  # keeps it alive, so that no other object gets its id
    if isinstance(value, torch.Tensor):
        if not value.requires_grad and not value.is_meta:
            yield partial(restore, value, value.detach().clone())
    elif isinstance(value, np.ndarray):
        if value.flags.writeable:
            yield partial(np.copyto, value, value.copy())
    elif isinstance(value, torch.Generator):
        yield partial(value.set_state, value.get_state())
    elif isinstance(value, random.Random):
        yield partial(value.setstate, value.getstate())
    elif isinstance(value, np.random.Generator):
        yield partial(setattr, value.bit_generator, "state", value.bit_generator.state)
    elif isinstance(value, np.random.RandomState):
        yield partial(value.set_state, value.get_state())
    elif isinstance(value, (list, deque, dict, set, tuple)):
        items = _items(value)
        if not isinstance(value, tuple):
            yield partial(_refill, value, items)
        for item in items:
            yield from _undos(item, seen)
    elif _is_plain(value):
        yield from _undos(vars(value), seen)


def _items(value: Any) -> list[Any]:
    # No `copy`, because a subclass, such as a cache of limited size, may make something else.
    return [part for pair in value.items() for part in pair] if isinstance(value, dict) else list(value)


def _refill(value: Any, items: list[Any]) -> None:
    """Restores a container's items if they changed; a frozen container cannot be written."""
    if [*map(id, _items(value))] != [*map(id, items)]:
        value.clear()
        if isinstance(value, (list, deque)):
            value.extend(items)
        else:
            value.update(zip(items[::2], items[1::2], strict=True) if isinstance(value, dict) else items)


def _is_plain(value: object) -> bool:
    """Returns whether all state of an object is in its `__dict__`, unlike a connection's state."""
    kind = type(value)
    if isinstance(value, nn.Module):
        return True
    return (
        isinstance(getattr(value, "__dict__", None), dict)
        and not isinstance(value, (type, ModuleType, FunctionType, MethodType))
        and kind.__reduce_ex__ is object.__reduce_ex__
        and kind.__reduce__ is object.__reduce__
        and getattr(kind, "__getstate__", None) in (None, getattr(object, "__getstate__", None))
    )
