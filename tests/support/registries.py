"""Names of registries for tests; `make test` leaves out names of extras, which `make test-extras` tests."""

from __future__ import annotations

from importlib.util import find_spec
from typing import Any

import pytest

from ringspark.estimators.lazy_imports import LazyRegistry

EXTRAS = "ringspark.extras"


def has_extras() -> bool:
    return find_spec(EXTRAS) is not None


def names_of(registry: LazyRegistry[Any]) -> list[Any]:
    """Returns one pytest parameter per name; names of extras have the mark `extras`."""
    return [
        pytest.param(name, marks=[pytest.mark.extras] if path.startswith(EXTRAS) else [])
        for name, path in registry.paths.items()
    ]


def list_available(registry: LazyRegistry[Any]) -> list[str]:
    """Returns the names whose modules are installed: without extras, the names of the core."""
    return [name for name, path in registry.paths.items() if has_extras() or not path.startswith(EXTRAS)]
