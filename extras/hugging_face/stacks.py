"""Finds the lists of equal blocks in a network of the transformers library, and the modules before them."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from torch import nn


@dataclass(frozen=True)
class Stack:
    """A list of blocks that run one after another.

    Attributes:
        path: Name of the list.
        length: Number of blocks.
        trunk: Name of the module that embeds the inputs, runs the blocks and norms the result.
        before: Names of the modules with parameters that run before the blocks.
    """

    path: str
    length: int
    trunk: str
    before: tuple[str, ...]

    def block(self, number: int) -> str:
        return f"{self.path}.{number}"


def find_stacks(network: nn.Module) -> list[Stack]:
    """Returns the stacks in the order of their execution.

    The library marks the classes of blocks by `_no_split_modules`, and registers modules in the order of
    their execution. A driver's check compares the divided network with the whole one.
    """
    kinds = set(getattr(network, "_no_split_modules", None) or ())
    return [
        Stack(name, len(found), trunk := _trunk_of(network, name), _modules_before(network, name, trunk))
        for name, found in network.named_modules()
        if isinstance(found, nn.ModuleList) and len(found) and all(type(b).__name__ in kinds for b in found)
    ]


def ancestors(path: str) -> Iterator[str]:
    """Yields the names of the modules around a module, from the outermost to its owner."""
    parts = path.split(".")
    for end in range(1, len(parts)):
        yield ".".join(parts[:end])


def _trunk_of(network: nn.Module, path: str) -> str:
    owner = path.rpartition(".")[0]
    while owner:
        others = [name for name, _ in network.get_submodule(owner).named_parameters(owner)]
        if any(not name.startswith(f"{path}.") for name in others):
            break
        owner = owner.rpartition(".")[0]
    return owner


def _modules_before(network: nn.Module, path: str, trunk: str) -> tuple[str, ...]:
    found = []
    for inner in [*ancestors(path), path]:
        owner, _, key = inner.rpartition(".")
        for name, child in network.get_submodule(owner).named_children():
            if name == key:
                break
            if any(True for _ in child.parameters()):
                found.append(f"{owner}.{name}".lstrip("."))
    return tuple(found)
