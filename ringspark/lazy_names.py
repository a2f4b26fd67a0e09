"""Public names of a package, each imported when it is first used."""

from __future__ import annotations

import ast
import inspect
import sys
from collections.abc import Callable
from importlib import import_module
from typing import Any


def export_lazily(package: str) -> tuple[Callable[[str], Any], Callable[[], list[str]], list[str]]:
    """Returns `__getattr__`, `__dir__` and `__all__` of a package.

    The public names are the imports `from module import name as name` in the package's file, which only type
    checkers run: they are under `if TYPE_CHECKING`.
    """
    tree = ast.parse(inspect.getsource(sys.modules[package]))
    imports = [node for node in ast.walk(tree) if isinstance(node, ast.ImportFrom)]
    modules = {each.asname: str(node.module) for node in imports for each in node.names if each.asname}
    public = sorted(modules)

    def get(name: str) -> Any:
        if name not in modules:
            raise AttributeError(f"module {package!r} has no attribute {name!r}")
        return getattr(import_module(modules[name]), name)

    return get, lambda: public, public
