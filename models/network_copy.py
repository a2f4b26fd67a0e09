"""Copies and pickles networks with all that ties their parts together.

Closures, hooks of tensors and modules, attributes of parameters, shared memory, weak references and
parametrizations hold in the copy. `copy.deepcopy` keeps functions by reference, so that a closure would still
use the original network, and torch's own pickling drops the hooks of tensors and separates shared memory.
"""

from __future__ import annotations

import functools
import io
import pickle
import sys
import weakref
from collections.abc import Callable, Iterable, Mapping
from typing import Any, TypeVar

import cloudpickle
import numpy as np
import torch
from torch import nn
from torch.nn.parameter import is_lazy
from torch.nn.utils import parametrize

T = TypeVar("T")


class NetworkPickler(cloudpickle.Pickler):  # type: ignore[misc]
    """Pickles networks and what refers to them; `pickle.loads` reads the result.

    The storages in `empty`, from `weight_storages`, become storages without memory, on the meta device.
    """

    def __init__(self, file: io.BytesIO, empty: Mapping[int, object] | None = None) -> None:
        super().__init__(file)
        self._empty = empty or {}

    def reducer_override(self, obj: Any) -> Any:
        if isinstance(obj, torch.UntypedStorage):
            if id(obj) in self._empty:
                return _make_empty, (obj.nbytes(),)
            values = torch.empty(0, dtype=torch.uint8, device=obj.device).set_(obj)
            return _make_storage, (values.cpu().numpy(), str(obj.device))
        if type(obj) is torch.storage.TypedStorage:
            # torch wraps the storage again for each tensor, so pickle would copy it for each.
            return _wrap_storage, (obj._untyped_storage, obj.dtype)
        if isinstance(obj, torch.Tensor):
            return _reduce_tensor(obj)
        if isinstance(obj, functools._lru_cache_wrapper) and not _is_importable(obj):
            return _cache_again, (obj.__wrapped__, obj.cache_parameters())
        if isinstance(obj, functools.cached_property):  # holds a lock until Python 3.12
            return _property_again, (obj.func, obj.attrname)
        if isinstance(obj, weakref.ref):
            alive = obj()
            return weakref.ref, (frozenset() if alive is None else alive,)
        if isinstance(obj, nn.Module) and parametrize.is_parametrized(obj):
            return _new, (type(obj).__bases__[0],), vars(obj), None, None, _set_parametrized
        return super().reducer_override(obj)


class _Copier(NetworkPickler):
    """Pickles for this process: `kept` has copies of storages, and shared objects, by persistent id."""

    def __init__(
        self,
        file: io.BytesIO,
        empty: Mapping[int, object],
        take: Callable[[torch.UntypedStorage], torch.UntypedStorage],
        replaced: Mapping[int, object],
    ) -> None:
        super().__init__(file, empty)
        self._take, self._replaced = take, replaced
        self.kept: dict[int, object] = {}
        self._originals: list[object] = []  # keeps them alive, so that no two have the same `id`

    def persistent_id(self, obj: Any) -> int | None:
        key = id(obj)
        if key in self.kept:
            return key
        if key in self._replaced:
            self.kept[key] = self._replaced[key]
        elif isinstance(obj, torch.UntypedStorage) and key not in self._empty:
            self.kept[key] = self._take(obj)
        elif getattr(type(obj), "belongs_to_rank", False):
            self.kept[key] = obj
        else:
            return None
        self._originals.append(obj)
        return key


class _CopyReader(pickle.Unpickler):
    def __init__(self, file: io.BytesIO, kept: Mapping[int, object]) -> None:
        super().__init__(file)
        self._kept = kept

    def persistent_load(self, key: int) -> object:
        return self._kept[key]


def copy_by_pickle(
    value: T,
    *,
    empty: Mapping[int, object] | None = None,
    take: Callable[[torch.UntypedStorage], torch.UntypedStorage] = torch.UntypedStorage.clone,
    replaced: Mapping[int, object] | None = None,
) -> T:
    """Returns a copy in this process; objects with `belongs_to_rank`, such as connections, are shared.

    Args:
        empty: Storages that become meta-device storages, from `weight_storages`.
        take: Returns the storage that the copy uses in place of one of the original's.
        replaced: `id` of an object -> the object that the copy has in its place.
    """
    file = io.BytesIO()
    copier = _Copier(file, empty or {}, take, replaced or {})
    copier.dump(value)
    file.seek(0)
    copied: T = _CopyReader(file, copier.kept).load()
    return copied


def weight_storages(module: nn.Module) -> dict[int, object]:
    """Returns the storages of parameters and persistent buffers by `id`; a checkpoint has their values."""
    return {id(storage): storage for storage in map(_storage, _saved_tensors(module)) if storage is not None}


def _saved_tensors(module: nn.Module) -> Iterable[torch.Tensor]:
    yield from module.parameters()
    for owner in module.modules():
        for name, buffer in owner._buffers.items():
            if buffer is not None and name not in owner._non_persistent_buffers_set:
                yield buffer


def _storage(tensor: torch.Tensor) -> torch.UntypedStorage | None:
    is_plain = not is_lazy(tensor) and tensor.layout == torch.strided and not tensor.is_meta
    return tensor.untyped_storage() if is_plain and torch._C._has_storage(tensor) else None


HOOKS = ("_backward_hooks", "_post_accumulate_grad_hooks")


def tensor_attributes(tensor: torch.Tensor) -> dict[str, Any]:
    """Returns the attributes, the hooks and the class that a user gave to a tensor."""
    given = {name: getattr(tensor, name, None) for name in HOOKS} if tensor.is_leaf else {}
    if type(tensor) is not nn.Parameter and _is_parameter(tensor):
        given["__class__"] = type(tensor)  # torch makes a plain parameter of it
    return vars(tensor) | {name: value for name, value in given.items() if value}


def _is_parameter(tensor: torch.Tensor) -> bool:
    return type(tensor).__reduce_ex__ is nn.Parameter.__reduce_ex__


def set_tensor_attributes(tensor: torch.Tensor, attributes: Mapping[str, Any]) -> None:
    for name, value in attributes.items():
        setattr(tensor, name, value)


def restore(tensor: torch.Tensor, value: torch.Tensor) -> None:
    """Writes `value` into a tensor that has another value; torch cannot write into an expanded tensor."""
    # By value, because a change of `.data` moves no version.
    if tensor.layout != torch.strided or not torch.equal(tensor, value):
        tensor.copy_(value)


def _reduce_tensor(tensor: torch.Tensor) -> Any:
    attributes = {} if is_lazy(tensor) else tensor_attributes(tensor)
    if not attributes:
        return NotImplemented
    bare = tensor.detach()
    if _is_parameter(tensor):
        bare = nn.Parameter(bare, tensor.requires_grad)
    elif type(tensor) is torch.Tensor:
        bare.requires_grad_(tensor.requires_grad)
    else:
        return NotImplemented
    # Set after the tensor is made, because an attribute or a hook may refer to the tensor itself.
    make, arguments = bare.__reduce_ex__(2)  # type: ignore[no-untyped-call]
    return make, arguments, attributes, None, None, set_tensor_attributes


def _wrap_storage(storage: torch.UntypedStorage, dtype: torch.dtype) -> torch.storage.TypedStorage:
    return torch.storage.TypedStorage(wrap_storage=storage, dtype=dtype, _internal=True)  # type: ignore[no-untyped-call]


def _make_empty(num_bytes: int) -> torch.UntypedStorage:
    return torch.UntypedStorage(num_bytes, device="meta")  # type: ignore[no-untyped-call]


def _make_storage(values: np.ndarray, device: str) -> torch.UntypedStorage:
    return torch.tensor(values, device=device).untyped_storage()


def _is_importable(function: Any) -> bool:
    module = sys.modules.get(function.__module__)
    by_value = {"__main__", *cloudpickle.list_registry_pickle_by_value()}
    return function.__module__ not in by_value and getattr(module, function.__qualname__, None) is function


def _cache_again(function: Callable[..., Any], parameters: dict[str, Any]) -> Any:
    return functools.lru_cache(**parameters)(function)


def _property_again(function: Callable[[Any], Any], name: str | None) -> functools.cached_property[Any]:
    made = functools.cached_property(function)
    made.attrname = name
    return made


def _new(kind: type[nn.Module]) -> nn.Module:
    return kind.__new__(kind)


def _set_parametrized(module: nn.Module, state: dict[str, Any]) -> None:
    # torch makes a class for each parametrized layer, and lets nothing pickle it.
    vars(module).update(state)
    parametrize._inject_new_class(module)
    for name in state["_modules"]["parametrizations"]:
        parametrize._inject_property(module, name)
