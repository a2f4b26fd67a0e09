"""Every setting of the estimators, by the name that users know."""

from __future__ import annotations

from typing import Any

from ringspark.estimators.training.settings import (
    columns,
    consistency,
    exchange,
    large_batches,
    local_training,
    memory,
    observation,
    optimization,
    parallelism,
    places,
    python_objects,
    recovery,
    tuning,
    workers,
)
from ringspark.estimators.training.settings.declaration import Setting

SETTINGS: dict[str, Setting[Any]] = {
    value.name: value
    for subject in (
        python_objects,
        optimization,
        large_batches,
        tuning,
        columns,
        workers,
        parallelism,
        exchange,
        consistency,
        local_training,
        memory,
        places,
        recovery,
        observation,
    )
    for value in vars(subject).values()
    if isinstance(value, Setting)
}
