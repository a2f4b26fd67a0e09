"""Deferred initialization: builds a network on `meta`, and initializes one parameter at a time later.

Initializing a parameter replays the constructor's operations on it, from the recorded state of the random
generator. The values are therefore bitwise the same as in a network built at once.

The replay misses some effects of a constructor: hooks on parameters, a seed or default dtype that it
sets, and changes to tensors outside of the module or to tensors that the constructor has already read.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import torch
from torch import nn
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map

_META = torch.device("meta")


class _CannotDeferError(Exception):
    """The constructor does something that cannot be replayed."""


def defer_initialization(build: Callable[[], nn.Module]) -> tuple[nn.Module, InitialWeights] | None:
    """Returns a network with its parameters on `meta`, and an object that computes their initial weights.

    Returns None if the constructor reads a tensor's values (`tensor.item()`), uses a random generator of its
    own, or keeps tensors other than parameters in a list. The random generator is then unchanged.
    """
    start = torch.get_rng_state()
    recorder = _Recorder(start)
    try:
        with recorder, _PretendCpu():
            module = build()
        parameters = dict(module.named_parameters(remove_duplicate=False))
        _fill_others(module, recorder)
    except Exception:  # a constructor that gets meta tensors may raise anything
        torch.set_rng_state(start)
        return None
    return module, InitialWeights(recorder, {name: p.detach() for name, p in parameters.items()})


class InitialWeights:
    """Computes initial weights by parameter name; a tied parameter is found under each of its names."""

    def __init__(self, recorder: _Recorder, tensors: dict[str, torch.Tensor]) -> None:
        self.tensors = tensors
        self._recorder = recorder

    def initialize(self, name: str) -> torch.Tensor:
        """Returns the whole parameter on the CPU; leaves the random generator unchanged."""
        if not self.tensors[name].is_meta:
            return self.tensors[name].clone()  # a small tensor made from a list
        with torch.random.fork_rng(devices=[]):
            return self._recorder.replay(self.tensors[name])


def _fill_others(module: nn.Module, recorder: _Recorder) -> None:
    parameters = {id(p) for p in module.parameters()}
    with torch.random.fork_rng(devices=[]):
        for owner in module.modules():
            for name, buffer in owner._buffers.items():
                if buffer is not None and buffer.is_meta:
                    owner._buffers[name] = recorder.replay(buffer)
            for name, value in vars(owner).items():
                if isinstance(value, torch.Tensor) and value.is_meta and id(value) not in parameters:
                    vars(owner)[name] = recorder.replay(value)
                elif name not in ("_parameters", "_buffers", "_modules"):
                    kept = tree_leaves(value) if isinstance(value, list | tuple | dict) else []
                    tensors = [leaf for leaf in kept if isinstance(leaf, torch.Tensor)]
                    if any(leaf.is_meta and id(leaf) not in parameters for leaf in tensors):
                        raise _CannotDeferError


@dataclass
class _RecordedOperation:
    """An operation that created the tensors `made`, and that reads or changes the storages `reads`."""

    func: Any
    args: Any
    kwargs: Any
    made: list[torch.Tensor] = field(default_factory=list)
    reads: set[int] = field(default_factory=set)
    is_random: bool = False


class _PretendCpu(TorchFunctionMode):
    """Reports `cpu` as the device of meta tensors, because `nn.init` skips meta tensors."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func == torch.Tensor.is_meta.__get__:  # type: ignore[attr-defined]
            return False
        if func == torch.Tensor.device.__get__:
            return torch.device("cpu")
        return func(*args, **(kwargs or {}))


class _Recorder(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Records every operation, and runs it on `meta`.

    The recorded tensors keep every storage alive, so no two storages get the same address.
    """

    def __init__(self, start: torch.Tensor) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._start = start
        self._operations: list[_RecordedOperation] = []
        self._writers: dict[int, list[int]] = {}  # storage -> indices of operations that write it

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        leaves = tree_leaves((args, kwargs))
        tensors = [leaf for leaf in leaves if isinstance(leaf, torch.Tensor)]
        if any(isinstance(leaf, torch.Generator) for leaf in leaves):
            raise _CannotDeferError
        is_random = torch.Tag.nondeterministic_seeded in func.tags
        takes_device = any(argument.name == "device" for argument in func._schema.arguments)
        if tensors and not any(map(_is_meta, tensors)):
            if is_random:
                raise _CannotDeferError
            return func(*args, **kwargs)  # small tensors made from lists
        if not tensors and not takes_device:
            raise _CannotDeferError
        writes = func._schema.is_mutable
        if writes and not _is_meta(tensors[0]):
            raise _CannotDeferError
        # Detached copies: a parameter may get other storage, and a tensor be transposed in place.
        real = kwargs | {"device": torch.device("cpu")} if kwargs.get("device") == _META else kwargs
        operation = _RecordedOperation(
            func, tree_map(_detach, args), tree_map(_detach, real), is_random=is_random
        )
        given = kwargs | {"device": _META} if takes_device else kwargs
        result = func(*tree_map(_to_meta, args), **tree_map(_to_meta, given))
        results = [leaf for leaf in tree_leaves(result) if isinstance(leaf, torch.Tensor)]
        if not results:
            raise _CannotDeferError
        inputs = tree_leaves((operation.args, operation.kwargs))
        operation.reads = {_storage(leaf) for leaf in inputs if _is_meta(leaf)}
        operation.made = [r.detach() for r in results if _storage(r) not in operation.reads]
        if is_random and not (not tensors or (writes and len(tensors) == 1)):
            raise _CannotDeferError  # the number of draws may depend on values
        if operation.made or writes:
            for storage in {_storage(r) for r in results}:
                self._writers.setdefault(storage, []).append(len(self._operations))
            self._operations.append(operation)
        return result

    @cached_property
    def _states(self) -> dict[int, torch.Tensor]:
        """Random generator state before each random operation, by the operation's index."""
        states = {}
        torch.set_rng_state(self._start)
        for index, operation in enumerate(self._operations):
            if operation.is_random:
                states[index] = torch.get_rng_state()
                if operation.reads:
                    like, *others = operation.args
                    operation.func(_empty_like(like), *others, **operation.kwargs)
                else:
                    operation.func(*operation.args, **operation.kwargs)
        return states

    def replay(self, tensor: torch.Tensor) -> torch.Tensor:
        """Returns the initialized tensor.

        The caller must restore the random generator, which this method changes.
        """
        storages: dict[int, torch.UntypedStorage] = {}

        def real(leaf: Any) -> Any:
            if not _is_meta(leaf):
                return leaf
            found = torch.empty(0, dtype=leaf.dtype)
            return found.set_(storages[_storage(leaf)], leaf.storage_offset(), leaf.shape, leaf.stride())

        with torch.no_grad():
            for index in sorted(self._find_dependencies(tensor)):
                operation = self._operations[index]
                if operation.is_random:
                    torch.set_rng_state(self._states[index])
                done = operation.func(*tree_map(real, operation.args), **tree_map(real, operation.kwargs))
                if not operation.made:
                    continue
                results = [leaf for leaf in tree_leaves(done) if isinstance(leaf, torch.Tensor)]
                for meta, result in zip(operation.made, results[-len(operation.made) :], strict=True):
                    same = meta.stride() == result.stride() and not result.storage_offset()
                    kept = result if same else _empty_like(meta).copy_(result)
                    storages[_storage(meta)] = kept.untyped_storage()
            found: torch.Tensor = real(tensor.detach())
        return found

    def _find_dependencies(self, tensor: torch.Tensor) -> set[int]:
        needed: set[int] = set()
        # Each storage with the index of the operation that reads it: later writes do not count.
        left = [(_storage(tensor), len(self._operations))]
        while left:
            storage, before = left.pop()
            for index in self._writers.get(storage, ()):
                if index < before and index not in needed:
                    needed.add(index)
                    left += [(other, index) for other in self._operations[index].reads]
        return needed


def _storage(tensor: torch.Tensor) -> int:
    return int(tensor.untyped_storage()._cdata)


def _empty_like(meta: torch.Tensor) -> torch.Tensor:
    return torch.empty_strided(meta.shape, meta.stride(), dtype=meta.dtype)


def _is_meta(leaf: Any) -> bool:
    # Not by `Tensor.is_meta`, which `_PretendCpu` replaces.
    return isinstance(leaf, torch.Tensor) and leaf.untyped_storage().device == _META


def _detach(leaf: Any) -> Any:
    return leaf.detach() if _is_meta(leaf) else leaf


def _to_meta(leaf: Any) -> Any:
    return leaf.to(_META) if isinstance(leaf, torch.Tensor) and not _is_meta(leaf) else leaf
