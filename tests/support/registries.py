"""Names of registries for tests; `make test` leaves out names of extras, which `make test-extras` tests."""

from collections.abc import Iterable
from importlib import import_module
from typing import Any

import pytest

from ringspark.estimators.lazy_imports import LazyRegistry
from ringspark.estimators.training.optimizers.registry import OPTIMIZERS, FromExtras
from ringspark.models import MODELS

EXTRAS = "ringspark.extras"


def has_extras() -> bool:
    try:
        import_module(EXTRAS)
    except ModuleNotFoundError:
        return False
    return True


def names_of(registry: LazyRegistry[Any], names: Iterable[str] | None = None) -> list[Any]:
    """Returns one pytest parameter per name; names of extras have the mark `extras`.

    Args:
        names: Names of the registry; all of them by default.
    """
    return [
        pytest.param(name, marks=[pytest.mark.extras] if registry.paths[name].startswith(EXTRAS) else [])
        for name in (registry if names is None else names)
    ]


def list_available(registry: LazyRegistry[Any]) -> list[str]:
    """Returns the names whose modules are installed: without extras, the names of the core."""
    return [name for name, path in registry.paths.items() if has_extras() or not path.startswith(EXTRAS)]


def optimizer_names() -> list[Any]:
    """Returns one pytest parameter per optimizer; names of extras have the mark `extras`."""
    extra = {name for name, make in OPTIMIZERS.items() if isinstance(make, FromExtras)}
    return [pytest.param(name, marks=[pytest.mark.extras] if name in extra else []) for name in OPTIMIZERS]


def models_of(names: Iterable[str]) -> list[Any]:
    """Returns one pytest parameter per name of `MODELS`; networks of extras have the mark `extras`."""
    return [
        pytest.param(name, marks=[pytest.mark.extras] if MODELS[name].startswith(EXTRAS) else [])
        for name in names
    ]
