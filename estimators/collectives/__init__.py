"""Collectives: one file per library, all behind one protocol."""

from __future__ import annotations

from importlib.util import find_spec
from typing import Any

from ringspark.estimators.collectives.base import Collective, CollectiveError, Rendezvous, RendezvousInfo
from ringspark.estimators.collectives.traffic import Member
from ringspark.estimators.lazy_imports import load_object
from ringspark.pipelines.entry_points import load_entry_point

_FOLDER = "ringspark.estimators.collectives"
# Name -> import path, because a class is imported when it is chosen, not before.
COLLECTIVES = {
    "horovod": f"{_FOLDER}.horovod_collective:HorovodCollective",
    "torch": f"{_FOLDER}.torch_collective:TorchCollective",
    "local": f"{_FOLDER}.local_collective:LocalCollective",
}

# Other packages declare such a class as an entry point in this group.
ENTRY_POINTS = "ringspark.collectives"
# Attributes of the class; `ConnectedMember` has some of them.
_NEEDED = ("open_rendezvous", "connect", *(name for name in dir(Collective) if not name.startswith("_")))


def collective_class(name: str) -> Any:
    """Returns the class registered as `name`; raises ValueError if it is not installed or incomplete."""
    if name not in COLLECTIVES:
        return load_entry_point(ENTRY_POINTS, "collective", name, COLLECTIVES, _NEEDED)
    if name == "horovod" and find_spec(name) is None:
        # pip alone does not build it: its sources need an older C++ than this torch's headers.
        raise ValueError(
            f"collective {name!r} is not installed; set collective='torch', or build Horovod for this torch "
            "with `ringspark build-horovod`"
        )
    return load_object(COLLECTIVES[name])


__all__ = [
    "COLLECTIVES",
    "Collective",
    "CollectiveError",
    "Member",
    "Rendezvous",
    "RendezvousInfo",
    "collective_class",
]
