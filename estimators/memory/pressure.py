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
from torch import nn
from torch.nn.parameter import is_lazy

from ringspark.estimators.collectives import Collective
from ringspark.estimators.collectives.base import num_bytes
from ringspark.estimators.memory.available import Available, of_machine, of_process, of_spark_workers
from ringspark.estimators.memory.columns import column_of
from ringspark.estimators.memory.sharing import SHARDED_PARTS, shares
from ringspark.estimators.memory.sizes import show_bytes
from ringspark.estimators.training.settings.config import TrainConfig, UserObjects
from ringspark.models import ModelSpec
from ringspark.models.outputs import as_outputs
from ringspark.models.skeleton import build_skeleton, skeleton
from ringspark.pipelines import ShardManifest
from ringspark.pipelines.readers.demand import rows_in_flight

_PARTS = SHARDED_PARTS["parameters"]

# Optimizer -> bytes of state for each byte of a parameter, rounded down; none for those that are not here.
STATE_COPIES = {
    "momentum": 1,
    "adam": 2,
    "adamw": 2,
    "adamax": 2,
    "nadam": 2,
    "radam": 2,
    "rmsprop": 1,
    "adagrad": 1,
    "adadelta": 2,
    "lamb": 2,
    "lars": 1,
}


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
    needs = worker_needs(config, objects, manifest)
    if sum(needs.values()) <= limit.num_bytes:
        return
    # Costs a pass of the network on no data, so only what would be refused is looked at again.
    needs = worker_needs(config, objects, manifest, only_used=True)
    total = sum(needs.values())
    if total <= limit.num_bytes:
        return
    parts = ", ".join(f"{part} {show_bytes(count)}" for part, count in needs.items() if count)
    raise ValueError(
        f"training needs at least {show_bytes(total)} per worker ({parts}), and "
        f"{show_bytes(limit.num_bytes)} are available ({limit.source}); {_remedies(needs, config, limit)}"
    )


def worker_needs(
    config: TrainConfig, objects: UserObjects, manifest: ShardManifest, *, only_used: bool = False
) -> dict[str, int]:
    """Part -> bytes of the host's memory that the worker with the largest share holds at once, at least.

    Args:
        config: With its `num_workers`, `sharding` and `optimizer`.
        manifest: Of the shards, with all its splits.
        only_used: Whether to look which parameters a forward uses: the others have neither gradient nor
            state. Runs the network on `meta`, without data.
    """
    module = build_skeleton(ModelSpec.from_json(config.model)) if config.model else objects.module
    whole = num_bytes(t for t in (*module.parameters(), *module.buffers()) if not is_lazy(t))
    trained = {name: p for name, p in _dense(module).items() if p.requires_grad and not is_lazy(p)}
    if only_used:
        used = _used(module, config, manifest)
        trained = {name: p for name, p in trained.items() if name in used}
    gradients = num_bytes(trained.values())
    state = gradients * (0 if objects.optimizer is not None else STATE_COPIES.get(config.optimizer, 0))
    share = dict.fromkeys(_PARTS, 0.0) if config.use_gpu else shares(config.sharding, config.num_workers)
    own = {
        "parameters": int(whole * share.get("parameters", 1.0)),
        "optimizer state": int(state * share.get("optimizer_state", 1.0)),
    }
    reading = _reading(config, manifest)
    in_epoch, after_epoch = _checkpoints(config, manifest.select("train").num_rows)
    # Rank 0 copies all of it, while the training waits; the gradients are gone by then.
    copy = num_bytes(p for p in module.parameters() if not is_lazy(p)) + state
    moments: list[dict[str, int]] = [
        # Every rank makes the whole network on the host before it is cut or moved.
        {"parameters": whole},
        own | {"gradients": int(gradients * share.get("gradients", 1.0))} | reading,
        own | {"copy for a checkpoint": copy} | reading if in_epoch else {},
        own | {"copy for a checkpoint": copy} if after_epoch else {},
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


def _dense(module: nn.Module) -> dict[str, nn.Parameter]:
    """Parameters whose gradients are as large as they are, by name."""
    sparse = {
        id(owner.weight)
        for owner in module.modules()
        if isinstance(owner, nn.Embedding | nn.EmbeddingBag) and owner.sparse
    }
    return {name: p for name, p in module.named_parameters() if id(p) not in sparse}


def _used(module: nn.Module, config: TrainConfig, manifest: ShardManifest) -> set[str]:
    """Names of the parameters that the network's forward uses; none where that cannot be told."""
    network = skeleton(module)
    names = {id(parameter): name for name, parameter in network.named_parameters()}
    if any(is_lazy(parameter) for parameter in network.parameters()):
        return set()
    try:
        inputs = [column_of(manifest, name, 2).empty("meta") for name in config.input_columns]
        outputs = as_outputs(network.to("meta").train()(*inputs))
    # A user's network may look at its data.
    except Exception:
        return set()
    waiting = [output.grad_fn for output in outputs]
    seen, used = set(), set()
    while waiting:
        node = waiting.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        waiting += [following for following, _ in node.next_functions]
        used.add(names.get(id(getattr(node, "variable", None)), ""))
    return used


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
