"""Plain attributes of layers that forward passes may change, such as a count of steps or an own generator.

Each is a pair [kind, value] of JSON values. Tensors that need a gradient and large values are left out.
"""

from __future__ import annotations

import json
import random
from collections import deque
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from torch import nn

_SCALARS = (bool, int, float, str, type(None))
_DTYPES = {
    *(torch.float64, torch.float32, torch.bfloat16, torch.float16),
    *(torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8, torch.bool),
}
_OF_TORCH = vars(nn.Module()).keys()
# More items are data of the network, such as a vocabulary, and would make the record of a checkpoint large.
_MOST_ITEMS = 4096


def read_attributes(network: nn.Module) -> dict[str, list[Any]]:
    """Returns the attributes that can be stored: "<layer>:<attribute>" -> [kind, value]."""
    return {
        f"{layer}:{name}": found
        for layer, module in network.named_modules()
        for name, value in vars(module).items()
        if name not in _OF_TORCH and (found := _describe(value)) is not None
    }


def write_attributes(network: nn.Module, values: Mapping[str, list[Any]], device: torch.device) -> None:
    """Restores attributes; ignores layers that the network lacks.

    Changes lists, dicts, tensors and generators in place, because other objects may refer to them.
    """
    layers = dict(network.named_modules())
    for key, (kind, value) in values.items():
        layer, _, name = key.rpartition(":")
        if layer in layers:
            attributes: Any = vars(layers[layer])
            found = _restore(attributes.get(name), kind, value, device)
            # A generator that the layer has not made yet stays away, because `forward` may ask for it.
            if name in attributes or found is not None or kind == "scalar":
                attributes[name] = found


def _describe(value: Any) -> list[Any] | None:
    if type(value) in _SCALARS:
        return ["scalar", value]
    if type(value) in (np.float64, np.int64, np.bool_):
        return ["scalar", value.item()]
    if type(value) in (list, deque, dict) and len(value) <= _MOST_ITEMS:
        is_dict = isinstance(value, dict)
        items = value.values() if is_dict else value
        keys = value if is_dict else ()
        if all(type(item) in _SCALARS for item in items) and all(type(key) is str for key in keys):
            return [type(value).__name__, dict(value) if is_dict else list(value)]
    if type(value) is torch.Tensor:
        is_plain = value.layout == torch.strided and value.dtype in _DTYPES and not value.is_meta
        if is_plain and value.numel() <= _MOST_ITEMS and not value.requires_grad:
            return [str(value.dtype).removeprefix("torch."), value.tolist()]
    if isinstance(value, torch.Generator):
        return ["generator", value.get_state().tolist()]
    if type(value) is random.Random:
        return ["random", list(value.getstate())]
    if isinstance(value, np.random.Generator):
        try:
            return ["numpy", json.loads(json.dumps(value.bit_generator.state))]
        except TypeError:  # a generator whose state is an array
            return None
    return None


def _restore(present: Any, kind: str, value: Any, device: torch.device) -> Any:
    if kind == "generator" and isinstance(present, torch.Generator):
        present.set_state(torch.tensor(value, dtype=torch.uint8))
    elif kind == "random" and isinstance(present, random.Random):
        version, words, gauss = value
        present.setstate((version, tuple(words), gauss))
    elif kind == "numpy" and isinstance(present, np.random.Generator):
        present.bit_generator.state = value
    elif kind in ("list", "deque") and isinstance(present, list | deque):
        present.clear()
        present.extend(value)
    elif kind == "dict" and isinstance(present, dict):
        present.clear()
        present.update(value)
    elif kind in ("scalar", "list", "dict"):
        return value
    elif kind == "deque":
        return deque(value)
    elif isinstance(dtype := getattr(torch, kind, None), torch.dtype):
        made = torch.tensor(value, dtype=dtype, device=device)
        if isinstance(present, torch.Tensor) and (present.shape, present.dtype) == (made.shape, dtype):
            return present.detach_().copy_(made)
        return made
    return present
