"""Builds a network without numbers, and draws the numbers of one parameter at a time later.

For networks that are larger than the memory of whoever builds them, and of which it keeps a part. While the
constructor runs, tensors lie on torch's `meta` device, and what fills them is noted. Later the notes of one
parameter are replayed, with the random generator in the state in which it would have been: the numbers are
those of the network built as a whole, to the bit.

For constructors that are known, because not all that one may do is followed: hooks of parameters, seeds, a
default dtype, tensors that it keeps outside of the module or changes after it took numbers from them. One
that looks at numbers (`tensor.item()`), draws from generators of its own or keeps other tensors than
parameters in lists cannot be noted; `defer_initialization` then returns None.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
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
    """The constructor does what notes cannot tell."""


def defer_initialization(build: Callable[[], nn.Module]) -> tuple[nn.Module, InitialWeights] | None:
    """Returns a network whose parameters have no numbers yet, and what draws them; None if it cannot be.

    Buffers, and tensors that are plain attributes, have their numbers. Where the network cannot be built so,
    the random generator is as before.
    """
    start = torch.get_rng_state()
    notes = _Notes(start)
    try:
        with notes, _OnTheCpu():
            module = build()
        parameters = dict(module.named_parameters(remove_duplicate=False))
        _fill_others(module, notes)
    except Exception:  # of any kind: a constructor that meets tensors without numbers may raise anything
        torch.set_rng_state(start)
        return None
    return module, InitialWeights(notes, {name: p.detach() for name, p in parameters.items()})


class InitialWeights:
    """The first numbers of a network's parameters.

    Attributes:
        tensors: A tensor without numbers for each name, also for further names of tied parameters.
    """

    def __init__(self, notes: _Notes, tensors: dict[str, torch.Tensor]) -> None:
        self.tensors = tensors
        self._notes = notes

    def initialize(self, name: str) -> torch.Tensor:
        """Returns the numbers of a parameter, whole, on the CPU; leaves the random generator as it is."""
        if not self.tensors[name].is_meta:
            return self.tensors[name].clone()  # of few numbers that the constructor gave
        with _generator_kept():
            return self._notes.replayed(self.tensors[name])


def _fill_others(module: nn.Module, notes: _Notes) -> None:
    """Gives numbers to everything but parameters."""
    parameters = {id(p) for p in module.parameters()}
    with _generator_kept():
        for owner in module.modules():
            for name, buffer in owner._buffers.items():
                if buffer is not None and buffer.is_meta:
                    owner._buffers[name] = notes.replayed(buffer)
            for name, value in vars(owner).items():
                if isinstance(value, torch.Tensor) and value.is_meta and id(value) not in parameters:
                    vars(owner)[name] = notes.replayed(value)
                elif name not in ("_parameters", "_buffers", "_modules"):
                    kept = tree_leaves(value) if isinstance(value, list | tuple | dict) else []
                    tensors = [leaf for leaf in kept if isinstance(leaf, torch.Tensor)]
                    if any(leaf.is_meta and id(leaf) not in parameters for leaf in tensors):
                        raise _CannotDeferError


@dataclass
class _Operation:
    """One operation that made or changed tensors.

    Attributes:
        made: Its results in memory of their own.
        reads: Memory that it looks at or changes.
        is_random: Whether it draws from torch's generator.
    """

    func: Any
    args: Any
    kwargs: Any
    made: list[torch.Tensor] = field(default_factory=list)
    reads: set[int] = field(default_factory=set)
    is_random: bool = False


class _OnTheCpu(TorchFunctionMode):
    """Tells whoever asks that tensors are on the CPU: `nn.init` leaves those on `meta` as they are."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func == torch.Tensor.is_meta.__get__:  # type: ignore[attr-defined]
            return False
        if func == torch.Tensor.device.__get__:
            return torch.device("cpu")
        return func(*args, **(kwargs or {}))


class _Notes(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Notes every operation while it is active; its tensors have no numbers.

    The notes keep every memory, so that none gets the address of another.
    """

    def __init__(self, start: torch.Tensor) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._start = start
        self._operations: list[_Operation] = []
        self._writers: dict[int, list[int]] = {}  # of each memory, by the number of the operation

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        leaves = tree_leaves((args, kwargs))
        tensors = [leaf for leaf in leaves if isinstance(leaf, torch.Tensor)]
        if any(isinstance(leaf, torch.Generator) for leaf in leaves):
            raise _CannotDeferError
        is_random = torch.Tag.nondeterministic_seeded in func.tags
        takes_device = any(argument.name == "device" for argument in func._schema.arguments)
        if tensors and not any(map(_is_empty, tensors)):
            if is_random:
                raise _CannotDeferError
            return func(*args, **kwargs)  # few numbers that the constructor gave, as a tensor of a list
        if not tensors and not takes_device:
            raise _CannotDeferError
        writes = func._schema.is_mutable
        if writes and not _is_empty(tensors[0]):
            raise _CannotDeferError
        # As they are now: a parameter may get other memory, and a tensor be turned in place.
        real = kwargs | {"device": torch.device("cpu")} if kwargs.get("device") == _META else kwargs
        noted = _Operation(func, tree_map(_as_now, args), tree_map(_as_now, real), is_random=is_random)
        given = kwargs | {"device": _META} if takes_device else kwargs
        result = func(*tree_map(_without_numbers, args), **tree_map(_without_numbers, given))
        results = [leaf for leaf in tree_leaves(result) if isinstance(leaf, torch.Tensor)]
        if not results:
            raise _CannotDeferError
        noted.reads = {_memory(t) for t in tree_leaves((noted.args, noted.kwargs)) if _is_empty(t)}
        noted.made = [r.detach() for r in results if _memory(r) not in noted.reads]
        if is_random and not (not tensors or (writes and len(tensors) == 1)):
            raise _CannotDeferError  # how much it draws may depend on numbers
        if noted.made or writes:
            number = len(self._operations)
            self._operations.append(noted)
            for memory in {_memory(r) for r in results}:
                self._writers.setdefault(memory, []).append(number)
        return result

    @cached_property
    def _states(self) -> dict[int, torch.Tensor]:
        """The generator's state before each operation that draws; draws all of them, one at a time."""
        states = {}
        torch.set_rng_state(self._start)
        for number, operation in enumerate(self._operations):
            if operation.is_random:
                states[number] = torch.get_rng_state()
                if operation.reads:
                    like, *others = operation.args
                    operation.func(_memory_like(like), *others, **operation.kwargs)
                else:
                    operation.func(*operation.args, **operation.kwargs)
        return states

    def replayed(self, tensor: torch.Tensor) -> torch.Tensor:
        """Returns a tensor with its numbers, in memory of its own; the random generator changes."""
        numbers = sorted(self._needed(tensor))
        memories: dict[int, torch.UntypedStorage] = {}

        def real(leaf: Any) -> Any:
            if not _is_empty(leaf):
                return leaf
            found = torch.empty(0, dtype=leaf.dtype)
            return found.set_(memories[_memory(leaf)], leaf.storage_offset(), leaf.shape, leaf.stride())

        with torch.no_grad():
            for number in numbers:
                operation = self._operations[number]
                if operation.is_random:
                    torch.set_rng_state(self._states[number])
                done = operation.func(*tree_map(real, operation.args), **tree_map(real, operation.kwargs))
                if not operation.made:
                    continue
                results = [leaf for leaf in tree_leaves(done) if isinstance(leaf, torch.Tensor)]
                for noted, result in zip(operation.made, results[-len(operation.made) :], strict=True):
                    same = noted.stride() == result.stride() and not result.storage_offset()
                    kept = result if same else _memory_like(noted).copy_(result)
                    memories[_memory(noted)] = kept.untyped_storage()
            found: torch.Tensor = real(tensor.detach())
        return found

    def _needed(self, tensor: torch.Tensor) -> set[int]:
        """Returns the numbers of the operations on which a tensor depends."""
        needed: set[int] = set()
        # Each memory with the number of the operation that looks at it: later ones do not count.
        left = [(_memory(tensor), len(self._operations))]
        while left:
            memory, before = left.pop()
            for number in self._writers.get(memory, ()):
                if number < before and number not in needed:
                    needed.add(number)
                    left += [(other, number) for other in self._operations[number].reads]
        return needed


def _memory(tensor: torch.Tensor) -> int:
    return int(tensor.untyped_storage()._cdata)


def _memory_like(noted: torch.Tensor) -> torch.Tensor:
    """Returns a tensor of the same shape and order of memory on the CPU, without defined numbers."""
    return torch.empty_strided(noted.shape, noted.stride(), dtype=noted.dtype)


def _is_empty(leaf: Any) -> bool:
    # Not by `is_meta`, of which a constructor is told otherwise.
    return isinstance(leaf, torch.Tensor) and leaf.untyped_storage().device == _META


def _as_now(leaf: Any) -> Any:
    return leaf.detach() if _is_empty(leaf) else leaf


def _without_numbers(leaf: Any) -> Any:
    return leaf.to(_META) if isinstance(leaf, torch.Tensor) and not _is_empty(leaf) else leaf


@contextmanager
def _generator_kept() -> Iterator[None]:
    state = torch.get_rng_state()
    try:
        yield
    finally:
        torch.set_rng_state(state)
