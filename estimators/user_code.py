"""Pickles the user's own Python objects that neither a name nor JSON can describe.

Only the driver can import files that no package manager installed, such as `my_net.py`. So their classes and
functions are pickled by value, with their code.
"""

from __future__ import annotations

import io
import os
import sys
import sysconfig
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache, partial
from inspect import Signature, signature
from types import ModuleType
from typing import Any, TypeVar

import cloudpickle
from torch import nn

from ringspark.models.network_copy import NetworkPickler, copy_by_pickle

T = TypeVar("T")

# Modules that exist wherever this package runs, even outside site-packages.
_EVERYWHERE = ("ringspark", "pyspark", "py4j", "__main__")

# Modules are registered with cloudpickle for the whole process, so only one thread at a time may do it.
_lock = threading.Lock()


def dumps(value: Any, empty: Mapping[int, object] | None = None) -> bytes:
    """Pickles `value` with the code of the user's own files; raises ValueError if that fails.

    `empty` are storages of weights that are sent in another way, see `NetworkPickler`.
    """
    with _lock, _by_value(_own_modules()):
        try:
            return _dump(value, empty)
        except Exception as by_value:
            problem = by_value
    try:
        # A module with globals that cannot be pickled, such as a Spark session, may still be importable.
        by_name = _ByName(_dump(value, empty), f"{type(problem).__name__}: {problem}")
        return _dump(by_name, None)
    except Exception:
        raise _refusal(problem) from problem


def _dump(value: Any, empty: Mapping[int, object] | None) -> bytes:
    file = io.BytesIO()
    NetworkPickler(file, empty).dump(value)
    return file.getvalue()


def _refusal(problem: Exception) -> ValueError:
    return ValueError(
        f"the model or one of its functions cannot be sent to the workers: {problem}; define it without "
        "references to sessions, locks, open files or other objects of the driver, or give the model's class "
        "as a ModelSpec"
    )


def copy(value: T) -> T:
    """Copies the user's objects in this process, as the workers get them; raises ValueError if that fails."""
    try:
        return copy_by_pickle(value)
    except Exception as problem:
        raise _refusal(problem) from problem


def loads(pickled: bytes) -> Any:
    """Returns the value given to `dumps`. It runs code, so give it only bytes that you trust."""
    value = cloudpickle.loads(pickled)
    if not isinstance(value, _ByName):
        return value
    try:
        return cloudpickle.loads(value.pickled)
    except ModuleNotFoundError as error:
        raise ValueError(
            f"module {error.name!r} is not installed here and could not be pickled with the network "
            f"({value.problem}); import functions and classes from the module, not the module itself, keep "
            "locks and sessions out of the module's globals, or ship the module with --py-files"
        ) from error


# A value with its modules pickled by name, because pickling by value failed.
@dataclass(frozen=True)
class _ByName:
    pickled: bytes
    problem: str


def _own_modules() -> list[ModuleType]:
    names = ("stdlib", "platstdlib", "purelib", "platlib")
    folders = [sysconfig.get_path(name) for name in names]
    # A .pth file or PYTHONPATH may add folders of another environment.
    packages = ("site-packages", "dist-packages")
    folders += [path for path in sys.path if os.path.basename(os.path.normpath(path)) in packages]
    installed = tuple(os.path.realpath(folder) + os.sep for folder in folders)
    found = []
    for name, module in list(sys.modules.items()):
        file = getattr(module, "__file__", None)
        if not isinstance(file, str) or not file.endswith(".py") or name.split(".")[0] in _EVERYWHERE:
            continue
        # cloudpickle finds a module by `__name__`, which may differ for a module of a test or a plug-in.
        if getattr(module, "__name__", None) == name and not _real_path(file).startswith(installed):
            found.append(module)
    return found


# Cached, because every fit resolves the files of all modules, and links are slow.
_real_path = cache(os.path.realpath)


@contextmanager
def _by_value(modules: list[ModuleType]) -> Iterator[None]:
    known = cloudpickle.list_registry_pickle_by_value()
    mine = [module for module in modules if module.__name__ not in known]
    for module in mine:
        cloudpickle.register_pickle_by_value(module)
    try:
        yield
    finally:
        for module in mine:
            cloudpickle.unregister_pickle_by_value(module)


def signature_of(called: Any) -> Signature:
    """Returns the signature of a function or of a module's `forward`; any arguments if it has none."""
    if isinstance(called, partial) and isinstance(called.func, nn.Module):
        called = partial(called.func.forward, *called.args, **called.keywords)
    try:
        return signature(called.forward if isinstance(called, nn.Module) else called)
    except (TypeError, ValueError):  # a function in C, or no function
        return signature(lambda *args, **kwargs: None)
