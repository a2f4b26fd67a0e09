"""Imports objects on first use by import paths, "package.module:name".

ringspark refers to `ringspark.extras` by such paths, so ringspark works without the folder `extras`.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from importlib import import_module
from typing import Any, TypeVar

T = TypeVar("T")


def load_object(path: str) -> Any:
    module, _, name = path.partition(":")
    return getattr(import_module(module), name)


class LazyRegistry(Mapping[str, T]):
    """Maps names to objects; imports an object when it is read."""

    def __init__(self, paths: Mapping[str, str]) -> None:
        self.paths = dict(paths)

    def __getitem__(self, name: str) -> T:
        return load_object(self.paths[name])  # type: ignore[no-any-return]

    def __iter__(self) -> Iterator[str]:
        return iter(self.paths)

    def __len__(self) -> int:
        return len(self.paths)
