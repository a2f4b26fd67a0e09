"""Whether a worker's share of its host can hold a training at all: asked before anything is allocated.

The need is a lower bound: what a worker holds at once in the middle of an epoch, for certain. Activations,
communication buffers, the libraries themselves and whatever the user's code keeps are left out, so nothing
that fits is refused; `memoryBudget` is the check that counts activations too. What is available is an upper
bound likewise: page caches and free swap count.

The driver asks where it knows what a worker gets: where Spark limits its Python workers, and on local
masters. Every rank asks on its own host.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

import numpy as np
import torch
from torch import nn
from torch.nn.parameter import is_lazy

from ringspark.estimators.collectives import Collective
from ringspark.estimators.collectives.base import num_bytes
from ringspark.estimators.memory.available import Available, of_machine, of_process, of_spark_workers
from ringspark.estimators.memory.columns import column_of
from ringspark.estimators.memory.planner import Planner
from ringspark.estimators.memory.sharing import SHARDED_PARTS, shares
from ringspark.estimators.training.settings.byte_sizes import show_bytes
from ringspark.estimators.training.settings.config import TrainConfig, UserObjects
from ringspark.pipelines import ShardManifest
from ringspark.pipelines.readers.demand import rows_in_flight

# Copies of the trained parameters, above what any optimizer by name keeps as its state.
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
        conf: Of the Spark application.
        is_remote: Whether the driver is a Connect client, whose own host tells nothing.

    Raises:
        ValueError: One sentence with what is needed, what is available, and what to change.
    """
    limits = [of_spark_workers(conf)]
    master = conf.get("spark.master", "")
    if not is_remote and (master == "local" or master.startswith("local[")):
        limits.append(of_machine(config.num_workers, same_cgroup=True))
    check(config, objects, manifest, limits)


def check_on_rank(
    config: TrainConfig, objects: UserObjects, manifest: ShardManifest, collective: Collective
) -> None:
    """Refuses a training that this rank's host cannot hold. Runs on every rank, before it allocates anything.

    Raises:
        ValueError: As `check_on_driver`.
    """
    config = replace(config, num_workers=collective.size)
    check(config, objects, manifest, [of_process(), of_machine(collective.member.local_size)])
    # What one rank allocates must not be missing where another one looks.
    collective.barrier()


def check(
    config: TrainConfig, objects: UserObjects, manifest: ShardManifest, limits: list[Available | None]
) -> None:
    """Holds a worker's need against the least of the limits; None among them is for none known."""
    known = [limit for limit in limits if limit is not None]
    if not known:
        return
    limit = min(known, key=lambda found: found.num_bytes)
    planner = _planner(config, objects, manifest)
    trained = num_bytes(p for p in planner.network.parameters() if p.requires_grad and not is_lazy(p))
    at_most = _needs(config, manifest, planner.network, trained, _MOST_STATE * trained)
    # Most workers have plenty; only what may be refused is worth the run of a step.
    if sum(at_most.values()) <= limit.num_bytes:
        return
    try:
        needs = worker_needs(config, objects, manifest)
    except MemoryError:
        # A process that cannot even hold the planner's few megabytes cannot train.
        needs = at_most
    total = sum(needs.values())
    if total <= limit.num_bytes:
        return
    parts = ", ".join(f"{part} {show_bytes(count)}" for part, count in needs.items() if count)
    raise ValueError(
        f"training needs at least {show_bytes(total)} per worker ({parts}), and "
        f"{show_bytes(limit.num_bytes)} are available ({limit.source}); {_remedies(needs, config, limit)}"
    )


def worker_needs(config: TrainConfig, objects: UserObjects, manifest: ShardManifest) -> dict[str, int]:
    """Part -> bytes of the host's memory that the worker with the largest share holds at once, at least.

    Runs one step of the planner on two rows, so that parameters which the network does not use have
    neither gradient nor state. Of a network or an optimizer that needs its data, only the parameters count.
    """
    planner = _planner(config, objects, manifest)
    try:
        plan = planner.plan()
    except MemoryError:
        raise
    # Whatever a user's code does on fake tensors must not end a training that real ones would get through.
    except Exception:
        return _needs(config, manifest, planner.network, 0, 0)
    return _needs(config, manifest, planner.network, plan.gradients, plan.optimizer_state)


def _planner(config: TrainConfig, objects: UserObjects, manifest: ShardManifest) -> Planner:
    """Of the whole network on the host, without the techniques that only change activations."""
    plain = replace(
        config,
        use_gpu=False,
        sharding="none",
        precision="fp32",
        gradient_checkpointing="none",
        gradient_accumulation=1,
        activation_offload="none",
        activation_compression="none",
    )
    # The driver asks before it knows the losses; any that looks at all of the outputs will do.
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
    share = on_gpu if config.use_gpu else shares(config.sharding, config.num_workers)
    own = {
        "parameters": int(whole * share.get("parameters", 1.0)),
        "optimizer state": int(state * share.get("optimizer_state", 1.0)),
    }
    reading = _reading(config, manifest)
    in_epoch, after_epoch = _checkpoints(config, manifest.select("train").num_rows)
    # Rank 0 copies all of it, while the training waits; the gradients are gone by then.
    copy = {"copy for a checkpoint": parameters + state}
    moments: list[dict[str, int]] = [
        # Every rank makes the whole network on the host before it is cut or moved.
        {"parameters": whole},
        own | {"gradients": int(gradients * share.get("gradients", 1.0))} | reading,
        own | copy | reading if in_epoch else {},
        own | copy if after_epoch else {},
    ]
    return max(moments, key=lambda parts: sum(parts.values()))


def _checkpoints(config: TrainConfig, num_rows: int) -> tuple[bool, bool]:
    """Whether one is taken for certain within an epoch, and at the end of one."""
    num_steps = config.epochs * -(-num_rows // config.batch_size)
    steps, epochs = config.checkpoint_every_steps, config.checkpoint_every_epochs
    return steps is not None and steps < num_steps, epochs is not None and epochs < config.epochs


def _reading(config: TrainConfig, manifest: ShardManifest) -> dict[str, int]:
    names = [*config.input_columns, *config.label_columns]
    if config.weight_column is not None:
        names.append(config.weight_column)
    columns = {column.name: column for column in map(manifest.column_of, names)}
    held = rows_in_flight(
        list(columns.values()),
        np.asarray(manifest.select("train").row_groups, dtype=np.int64),
        num_shards=config.num_workers,
        batch_size=config.batch_size,
        shuffle=config.shuffle,
    )
    return {"row groups in flight": held.row_groups, "batches": held.blocks}


def _remedies(needs: dict[str, int], config: TrainConfig, limit: Available) -> str:
    """What would lower the largest part, and what always helps."""
    largest = max(needs, key=lambda part: needs[part])
    if largest == "copy for a checkpoint":
        first = "set checkpointEverySteps and checkpointEveryEpochs to nothing"
    elif largest == "row groups in flight":
        first = "write the shards with smaller row_group_rows"
    elif largest == "batches":
        first = "lower batchSize"
    elif config.num_workers > 1 and config.sharding != "parameters" and len(needs) > 1:
        first = "set sharding='parameters'" if config.collective == "torch" else "set sharding='gradients'"
    elif needs.get("optimizer state"):
        first = "take an optimizer with less state, such as 'adafactor' or 'sgd', or a smaller model"
    else:
        first = "take a smaller model"
    fewer = "run fewer workers on a host, or " if limit.workers > 1 else ""
    return f"{first}, or {fewer}give the workers more memory{limit.how}"
