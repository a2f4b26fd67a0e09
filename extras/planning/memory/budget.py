"""`memoryBudget`: refuses a training that would not fit, before a gang starts."""

from __future__ import annotations

import warnings

from ringspark.estimators.training.settings.byte_sizes import show_bytes
from ringspark.estimators.training.settings.config import TrainConfig, UserObjects
from ringspark.extras.planning.memory.columns import shard_columns
from ringspark.extras.planning.memory.planner import Planner
from ringspark.models import ModelSpec
from ringspark.pipelines import ShardManifest


def check_budget(
    config: TrainConfig, objects: UserObjects, manifest: ShardManifest, budget: int | None
) -> None:
    """Raises ValueError if a step needs more bytes per worker than `budget`. Runs on the driver."""
    if budget is None:
        return
    try:
        columns = shard_columns(config, manifest, config.most_rows)
        plan = Planner(config, objects, *columns).plan(budget, "memoryBudget")
    # A network that fails only on fake tensors must not end a fit.
    except Exception as error:
        warnings.warn(
            f"memoryBudget {show_bytes(budget)} could not be checked: model {network_name(config, objects)} "
            f"does not run without data: {first_error_line(error)}",
            UserWarning,
            stacklevel=8,
        )
        return
    if not plan.fits:
        raise ValueError(plan.verdict)


def first_error_line(error: Exception) -> str:
    """Returns the type and the first line of an error."""
    lines = str(error).strip().splitlines()
    return f"{type(error).__name__}: {lines[0]}" if lines else type(error).__name__


def network_name(config: TrainConfig, objects: UserObjects) -> str:
    return ModelSpec.from_json(config.model).target if config.model else type(objects.module).__name__
