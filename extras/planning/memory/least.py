"""The least memory of a training step, for the check of the workers' memory."""

from __future__ import annotations

from dataclasses import replace

from torch import nn

from ringspark.estimators.options.mesh import Mesh
from ringspark.estimators.training.build import build_empty
from ringspark.estimators.training.settings.config import TrainConfig, UserObjects
from ringspark.extras.planning.memory.columns import shard_columns
from ringspark.extras.planning.memory.planner import Planner
from ringspark.pipelines import ShardManifest


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
