"""Finds settings that change nothing, or not what one would expect, for a warning."""

from __future__ import annotations

from collections.abc import Iterator

from ringspark.estimators.stages.declared import values_of
from ringspark.estimators.stages.params import _TrainingParams
from ringspark.estimators.training.optimizers.registry import ADAPTIVE
from ringspark.estimators.training.settings.parallelism import AUTO, AXIS_OF_OPTION
from ringspark.estimators.training.settings.table import SETTINGS


def settings_without_effect(stage: _TrainingParams, on_shards: bool) -> Iterator[str]:
    """Yields one sentence for each Param that was set and does nothing, or does harm beside another."""
    given = values_of(stage)
    was_set = [setting for name, setting in SETTINGS.items() if name in given and stage.isSet(name)]
    for setting in was_set:
        if setting.without_effect is not None:
            is_idle, reason = setting.without_effect
            if is_idle(given):
                yield f"{setting.name} has no effect: {reason}"
    compression, optimizer = given["gradientCompression"], given["optimizer"]
    if compression.get("feedback") and optimizer in ADAPTIVE and given["numWorkers"] > 1:
        yield (
            f"gradientCompression {compression['name']!r} sends a part of each gradient in later steps, "
            f"which the squared gradients of optimizer {optimizer!r} do not expect; take "
            "optimizer='momentum', or 'adam1bit' with an 'after' of about a tenth of the steps"
        )
    mesh = {} if given["parallelism"] == AUTO else given["parallelism"]
    for option, axis in AXIS_OF_OPTION.items():
        if option in mesh and mesh.get(axis, 1) == 1:
            yield f"parallelism's {option!r} has no effect: it gives no workers to {axis!r}"
    schedule, epochs = given["batchSizeSchedule"], given["epochs"]
    if schedule and schedule[0][0] <= epochs < schedule[-1][0]:
        yield (
            f"batchSizeSchedule has {schedule[-1][1]} rows from epoch {schedule[-1][0]} on, and there are "
            f"{epochs} epochs"
        )
    for setting in was_set if on_shards else []:
        if setting.is_for_writing:
            yield (f"{setting.name} has no effect on fitOnShards: the shards are written already")
