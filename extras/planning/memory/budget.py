"""Plans the memory of a training before its gang starts: `memoryBudget`, and the least memory of a worker."""

from __future__ import annotations

import warnings
from dataclasses import replace

from torch import nn

from ringspark.estimators.options.mesh import Mesh
from ringspark.estimators.training.build import build_empty
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


def plan_least(
    config: TrainConfig, objects: UserObjects, manifest: ShardManifest
) -> tuple[nn.Module, int, int]:
    """Plans one step on two rows, on fake tensors.

    Returns the network on `meta`, and lower bounds of the bytes of gradients and of optimizer state on a
    worker, without sharding.
    """
    whole = config.without_sharding()
    plain = replace(
        whole,
        use_gpu=False,
        # Without the axis `shard`, whose ranks gather the weights in each step.
        parallelism=whole.parallelism if config.cuts_network else Mesh(),
        precision="fp32",
        gradient_checkpointing="none",
        gradient_accumulation=1,
        activation_offload="none",
        activation_compression="none",
    )
    # The driver does not know the losses yet; any loss that uses all outputs suffices.
    losses = (lambda output, label: output,) * len(config.label_columns)
    try:
        planner = Planner(plain, replace(objects, losses=losses), *shard_columns(config, manifest, 2))
        plan = planner.plan()
    except MemoryError:
        raise
    # Code that fails only on fake tensors must not end a training: only the parameters count then.
    except Exception:
        return build_empty(config, objects), 0, 0
    return planner.network, plan.gradients, plan.optimizer_state


def first_error_line(error: Exception) -> str:
    """Returns the type and the first line of an error."""
    lines = str(error).strip().splitlines()
    return f"{type(error).__name__}: {lines[0]}" if lines else type(error).__name__


def network_name(config: TrainConfig, objects: UserObjects) -> str:
    return ModelSpec.from_json(config.model).target if config.model else type(objects.module).__name__
