"""Collectives: one file per library, all behind one protocol."""

from __future__ import annotations

from importlib import import_module
from importlib.util import find_spec
from typing import Any

from ringspark.estimators.collectives.base import Collective, CollectiveError, Rendezvous, RendezvousInfo
from ringspark.estimators.collectives.traffic import Member
from ringspark.pipelines.entry_points import load_entry_point

# Name -> (module, class, the package it needs). Modules are imported when chosen, not before.
COLLECTIVES: dict[str, tuple[str, str, str]] = {
    "horovod": ("ringspark.estimators.collectives.horovod_collective", "HorovodCollective", "horovod"),
    "torch": ("ringspark.estimators.collectives.torch_collective", "TorchCollective", "torch"),
    "local": ("ringspark.estimators.collectives.local_collective", "LocalCollective", "torch"),
}


# Other packages declare such a class as an entry point in this group.
ENTRY_POINTS = "ringspark.collectives"
# Attributes of the class; `ConnectedMember` has some of them.
_NEEDED = ("open_rendezvous", "connect", *(name for name in dir(Collective) if not name.startswith("_")))


def collective_class(name: str) -> Any:
    """Returns the class registered as `name`; raises ValueError if it is not installed or incomplete."""
    if name not in COLLECTIVES:
        return load_entry_point(ENTRY_POINTS, "collective", name, COLLECTIVES, _NEEDED)
    module, class_name, package = COLLECTIVES[name]
    if find_spec(package) is None:
        # pip alone does not build it: its sources need an older C++ than this torch's headers.
        raise ValueError(
            f"collective {name!r} is not installed; set collective='torch', or build Horovod for this torch "
            "with `ringspark build-horovod`"
        )
    return getattr(import_module(module), class_name)


__all__ = [
    "COLLECTIVES",
    "Collective",
    "CollectiveError",
    "Member",
    "Rendezvous",
    "RendezvousInfo",
    "collective_class",
]
