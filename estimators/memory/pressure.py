"""Checks, before anything is allocated, whether a worker's share of its host can hold a training at all.

The need is a lower bound: the bytes that a worker certainly holds at once in the middle of an epoch. It
leaves out activations, communication buffers, the libraries and whatever the user's code keeps, so nothing
that fits is refused; `memoryBudget` is the check that counts activations too. The available memory is an
upper bound: page caches and free swap count.

The driver checks if it knows what a worker gets: if Spark limits its Python workers, and on local masters.
Every rank checks on its own host.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace

import torch
from torch import nn
from torch.nn.parameter import is_lazy

from ringspark.estimators.collectives import Collective
from ringspark.estimators.collectives.base import num_bytes
from ringspark.estimators.memory.available import Available, of_machine, of_process, of_spark_workers
from ringspark.estimators.memory.columns import column_of
from ringspark.estimators.memory.planner import Planner
from ringspark.estimators.memory.row_cache import settle_cache
from ringspark.estimators.memory.sharing import SHARDED_PARTS, num_sharers, shares
from ringspark.estimators.options.mesh import Mesh
from ringspark.estimators.parallel.mesh import share_of
from ringspark.estimators.training.batch_sizes import Steps
from ringspark.estimators.training.row_caching import estimate_reader_bytes
from ringspark.estimators.training.settings.byte_sizes import show_bytes
from ringspark.estimators.training.settings.config import TrainConfig, UserObjects
from ringspark.models.generators import keep_shared_generators
from ringspark.models.process_state import fork_generators
from ringspark.pipelines import ShardManifest

# Copies of the trained parameters: more than any named optimizer keeps as its state.
_MOST_STATE = 3


def check_on_driver(
    config: TrainConfig,
    objects: UserObjects,
    manifest: ShardManifest,
    conf: Mapping[str, str],
    is_remote: bool,
) -> None:
    """Refuses a training that cannot fit, as far as the driver can tell.

    Args:
        conf: Conf of the Spark application.
        is_remote: Whether the driver is a Connect client, whose host is not the workers'.

    Raises:
        ValueError: It cannot fit; the error names the need, the available bytes and a remedy.
    """
    check(config, objects, manifest, limits_on_driver(config.num_workers, conf, is_remote))


def limits_on_driver(num_workers: int, conf: Mapping[str, str], is_remote: bool) -> list[Available | None]:
    """Returns what the driver knows of a worker's memory; the arguments are those of `check_on_driver`."""
    limits = [of_spark_workers(conf)]
    if is_on_driver(conf, is_remote):
        limits.append(of_machine(num_workers, same_cgroup=True))
    return limits


def is_on_driver(conf: Mapping[str, str], is_remote: bool) -> bool:
    """Whether the workers run on the driver's host: on local masters."""
    master = conf.get("spark.master", "")
    return not is_remote and (master == "local" or master.startswith("local["))


def check_on_rank(
    config: TrainConfig, objects: UserObjects, manifest: ShardManifest, collective: Collective
) -> TrainConfig:
    """Refuses a training that this rank's host cannot hold. Runs on every rank, before it allocates anything.

    Returns:
        The config, in which a `cache` of "auto" is what this rank has room for.

    Raises:
        ValueError: Like `check_on_driver`.
    """
    size, local_size = collective.size, collective.member.local_size
    limits = [of_process(), of_machine(local_size)]
    config_here = replace(config, num_workers=size)
    left = check(config_here, objects, manifest, limits)
    # Ranks of one copy of the network read, and keep, the same rows.
    share, num_shares = share_of(config_here.axes, collective.rank)
    config = settle_cache(config, manifest, share, num_shares, local_size, left)
    # No rank allocates before all have looked: they may share a host.
    collective.barrier()
    return config


def check(
    config: TrainConfig, objects: UserObjects, manifest: ShardManifest, limits: list[Available | None]
) -> int | None:
    """Compares a worker's need with the lowest of the limits; None stands for an unknown limit.

    Returns:
        The bytes that are left beside the need; None without a limit.
    """
    known = [limit for limit in limits if limit is not None]
    if not known:
        return None
    limit = min(known, key=lambda found: found.num_bytes)
    # A user's network may draw numbers where it is made or run, and Spark uses this process again.
    with fork_generators(), keep_shared_generators():
        return _check(config, objects, manifest, limit)


def _check(config: TrainConfig, objects: UserObjects, manifest: ShardManifest, limit: Available) -> int:
    """Refuses what needs more than the limit; looks closely only where a rough bound does."""
    planner = _planner(config, objects, manifest)
    trained = num_bytes(p for p in planner.network.parameters() if p.requires_grad and not is_lazy(p))
    at_most = _needs(config, manifest, planner.network, trained, _MOST_STATE * trained)
    # Most workers have plenty of memory; the step runs only for a training that may be refused.
    if sum(at_most.values()) <= limit.num_bytes:
        return limit.num_bytes - sum(at_most.values())
    try:
        needs = worker_needs(config, objects, manifest)
    except MemoryError:
        # A process that cannot even hold the planner's few megabytes cannot train.
        needs = at_most
    total = sum(needs.values())
    if total <= limit.num_bytes:
        return limit.num_bytes - total
    parts = ", ".join(f"{part} {show_bytes(count)}" for part, count in needs.items() if count)
    raise ValueError(
        f"training needs at least {show_bytes(total)} per worker ({parts}), and "
        f"{show_bytes(limit.num_bytes)} are available ({limit.source}); {_remedies(needs, config, limit)}"
    )


def worker_needs(config: TrainConfig, objects: UserObjects, manifest: ShardManifest) -> dict[str, int]:
    """Returns, for each part, a lower bound of the host bytes that the most loaded worker holds at once.

    Runs one step of the planner on two rows, so that parameters which the network does not use have
    neither gradient nor state. If network or optimizer cannot run without data, only the parameters count.
    """
    planner = _planner(config, objects, manifest)
    try:
        plan = planner.plan()
    except MemoryError:
        raise
    # Code that fails only on fake tensors must not end a training that would run on real ones.
    except Exception:
        return _needs(config, manifest, planner.network, 0, 0)
    return _needs(config, manifest, planner.network, plan.gradients, plan.optimizer_state)


def _planner(config: TrainConfig, objects: UserObjects, manifest: ShardManifest) -> Planner:
    """Returns the planner of the whole network on the host, without techniques that only save activations."""
    whole = config.without_sharding()
    plain = replace(
        whole,
        use_gpu=False,
        # Ranks with parts of the weights between their uses have whole ones in a step.
        parallelism=whole.parallelism if config.cuts_network else Mesh(),
        precision="fp32",
        gradient_checkpointing="none",
        gradient_accumulation=1,
        activation_offload="none",
        activation_compression="none",
    )
    # The driver does not know the losses yet; any loss that uses all outputs will do.
    losses = (_output_alone,) * len(config.label_columns)
    inputs, labels = (
        [column_of(manifest, name, 2) for name in names]
        for names in (config.input_columns, config.label_columns)
    )
    return Planner(plain, replace(objects, losses=losses), inputs, labels)


def _output_alone(output: torch.Tensor, label: torch.Tensor) -> torch.Tensor:
    return output


def _needs(
    config: TrainConfig, manifest: ShardManifest, network: nn.Module, gradients: int, state: int
) -> dict[str, int]:
    parameters = num_bytes(p for p in network.parameters() if not is_lazy(p))
    whole = parameters + num_bytes(b for b in network.buffers() if not is_lazy(b))
    on_gpu = dict.fromkeys(SHARDED_PARTS["parameters"], 0.0)
    share = on_gpu if config.use_gpu else shares(config.sync.sharding, num_sharers(config))
    # At least one worker has its even part of what a mesh cuts; state and gradients were planned as parts.
    parts = math.prod(config.axes[axis] for axis in ("tensor", "pipeline", "expert"))
    own = {
        "parameters": int(whole / parts * share.get("parameters", 1.0)),
        "optimizer state": int(state * share.get("optimizer_state", 1.0)),
    }
    reading = estimate_reader_bytes(config, manifest)
    in_epoch, after_epoch = _checkpoints(config, manifest.select("train").num_rows)
    # Each writer copies its parameters and state while the training waits; the gradients are freed by then.
    copy = {"copy for a checkpoint": parameters // parts + state}
    moments: list[dict[str, int]] = [
        # Every rank makes the whole network on the host before it is cut or moved, unless parts will do.
        {} if config.builds_in_parts else {"parameters": whole},
        own | {"gradients": int(gradients * share.get("gradients", 1.0))} | reading,
        own | copy | reading if in_epoch else {},
        own | copy if after_epoch else {},
    ]
    return max(moments, key=lambda parts: sum(parts.values()))


def _checkpoints(config: TrainConfig, num_rows: int) -> tuple[bool, bool]:
    """Returns whether a checkpoint is certain within some epoch, and at the end of one before the last."""
    num_steps = Steps(config.batch_sizes, num_rows).total
    steps, epochs = config.checkpoint_every_steps, config.checkpoint_every_epochs
    return steps is not None and steps < num_steps, epochs is not None and epochs < config.epochs


def _remedies(needs: dict[str, int], config: TrainConfig, limit: Available) -> str:
    """Names a change that lowers the largest part, and one that always helps."""
    largest = max(needs, key=lambda part: needs[part])
    if largest == "copy for a checkpoint":
        first = "set checkpointEverySteps and checkpointEveryEpochs to nothing"
    elif largest == "row groups in flight":
        first = "write the shards with smaller row_group_rows"
    elif largest == "kept rows":
        first = "set cache='disk' or cache='auto'"
    elif largest == "batches":
        first = "lower batchSize" + (" and the sizes of batchSizeSchedule" * bool(config.batch_size_schedule))
    elif config.num_workers > 1 and config.sync.sharding != "parameters" and len(needs) > 1:
        first = "set sharding='parameters'" if config.collective == "torch" else "set sharding='gradients'"
    elif needs.get("optimizer state"):
        first = "take an optimizer with less state, such as 'adafactor' or 'sgd', or a smaller model"
    else:
        first = "take a smaller model"
    fewer = "run fewer workers on a host, or " if limit.workers > 1 else ""
    return f"{first}, or {fewer}give the workers more memory{limit.how}"
