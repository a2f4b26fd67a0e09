"""Every setting of the estimators, by group and by its name as a Param."""

from __future__ import annotations

from typing import Any

from ringspark.estimators.training.settings import (
    data,
    memory,
    network,
    observation,
    recovery,
    training,
    workers,
)
from ringspark.estimators.training.settings.declaration import Setting

GROUPS: dict[str, list[Setting[Any]]] = {
    module.__name__.rpartition(".")[2]: [v for v in vars(module).values() if isinstance(v, Setting)]
    for module in (data, network, training, workers, memory, recovery, observation)
}
SETTINGS: dict[str, Setting[Any]] = {s.name: s for settings in GROUPS.values() for s in settings}
