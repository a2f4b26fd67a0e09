"""Strangers at every open port of a running gang."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from typing import Any

import pytest

from ringspark.estimators.collectives import COLLECTIVES

GANGS = [name for name in COLLECTIVES if name != "local"]


def _attacked_gang() -> Any:
    """The module beside this one, importable by name: the spawned ranks unpickle its function."""
    name = "ringspark_attacked_gang"
    if name not in sys.modules:
        spec = importlib.util.spec_from_file_location(name, Path(__file__).parent / "attacked_gang.py")
        assert spec is not None
        assert spec.loader is not None
        module = importlib.util.module_from_spec(spec)
        sys.modules[name] = module
        spec.loader.exec_module(module)
    return sys.modules[name]


@pytest.mark.distributed
@pytest.mark.parametrize("collective", GANGS)
def test_a_training_with_strangers_at_its_ports_ends_as_one_without(collective: str, tmp_path: Path) -> None:
    import cloudpickle

    gang = _attacked_gang()
    cloudpickle.register_pickle_by_value(gang)
    try:
        quiet = gang.run(collective, tmp_path, steps=150, attacked=False)
        attacked = gang.run(collective, tmp_path, steps=150, attacked=True)
    finally:
        cloudpickle.unregister_pickle_by_value(gang)
    assert quiet.reached == quiet.refused == 0
    # The rendezvous' port, at least, until the ranks had come.
    assert attacked.reached >= 1
    assert attacked.weights == quiet.weights
    assert len(set(attacked.weights)) == 1
    assert attacked.grown_bytes < 32 << 20
    assert attacked.grown_descriptors <= 2
