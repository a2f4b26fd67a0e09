"""Checks, before any allocation, whether a worker's share of its host can hold a training at all.

The need is a lower bound: it leaves out activations (see `memoryBudget`), communication buffers and
libraries, so nothing that fits is refused.
"""

from __future__ import annotations

import math
import os
import shutil
import tempfile
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

from torch import nn
from torch.nn.parameter import is_lazy

from ringspark.estimators.collectives import Collective
from ringspark.estimators.collectives.base import num_bytes
from ringspark.estimators.memory.available import (
    Available,
    find_host_limit,
    find_process_limit,
    find_spark_limit,
)
from ringspark.estimators.memory.shares import SHARDED_PARTS, checkpoint_writers, shard_group_size, shares
from ringspark.estimators.options.sync import SHARDINGS, Sync, Zero
from ringspark.estimators.parallel.mesh import find_data_shard
from ringspark.estimators.techniques import FUNCTIONS
from ringspark.estimators.training.batch_sizes import Steps
from ringspark.estimators.training.build import build_empty
from ringspark.estimators.training.row_caching import estimate_reader_bytes, find_cached_rows
from ringspark.estimators.training.settings.byte_sizes import show_bytes
from ringspark.estimators.training.settings.choices import Cache
from ringspark.estimators.training.settings.config import TrainConfig, UserObjects
from ringspark.estimators.training.settings.recovery import Recovery
from ringspark.estimators.training.settings.setting import settings_of
from ringspark.models.generators import keep_shared_generators
from ringspark.models.process_state import fork_generators
from ringspark.pipelines import ShardManifest
from ringspark.pipelines.manifest import SPLITS

# Upper bound of the optimizer state of all named optimizers, in multiples of the trained parameters.
_MOST_STATE = 3


def limits_on_driver(num_workers: int, conf: Mapping[str, str], *, is_here: bool) -> list[Available | None]:
    """Returns the limits of a worker's memory that the driver knows; `is_here`: workers are on its host."""
    host = find_host_limit(num_workers, same_cgroup=True) if is_here else None
    return [find_spark_limit(conf), host]


def check_on_rank(
    config: TrainConfig, objects: UserObjects, manifest: ShardManifest, collective: Collective
) -> TrainConfig:
    """Raises like `check_memory`, on every rank, for the limits of its host, before it allocates.

    Returns the config, with this rank's value for a `cache` of "auto".
    """
    size, local_size = collective.size, collective.member.local_size
    limits = [find_process_limit(), find_host_limit(local_size)]
    config_here = replace(config, num_workers=size)
    left = check_memory(config_here, objects, manifest, limits)
    # Ranks of one replica read, and keep, the same rows.
    share, num_shares = find_data_shard(config_here.axes, collective.rank)
    config = resolve_cache(config, manifest, share, num_shares, local_size, left)
    # No rank allocates before all have checked: they may share a host.
    collective.barrier()
    return config


# A user's network may draw random numbers, and Spark uses this process again.
@fork_generators()
@keep_shared_generators()
def check_memory(
    config: TrainConfig, objects: UserObjects, manifest: ShardManifest, limits: list[Available | None]
) -> int | None:
    """Raises ValueError if the lowest known limit is too low; returns the bytes left, None if unknown."""
    known = [limit for limit in limits if limit is not None]
    if not known:
        return None
    limit = min(known, key=lambda found: found.num_bytes)
    network = build_empty(config, objects)
    trained = num_bytes(p for p in network.parameters() if p.requires_grad and not is_lazy(p))
    at_most = _needs(config, manifest, network, trained, _MOST_STATE * trained)
    # Most workers have plenty of memory; the step is planned only if a rough bound does not fit.
    if sum(at_most.values()) <= limit.num_bytes or config.has_own_step:
        return max(0, limit.num_bytes - sum(at_most.values()))
    try:
        needs = worker_needs(config, objects, manifest)
    except ModuleNotFoundError:
        # Without extras, only the parameters are certain.
        needs = _needs(config, manifest, network, 0, 0)
    except MemoryError:
        # The planner needs only a few megabytes.
        needs = at_most
    total = sum(needs.values())
    if total <= limit.num_bytes:
        return limit.num_bytes - total
    parts = ", ".join(f"{part} {show_bytes(count)}" for part, count in needs.items() if count)
    raise ValueError(
        f"training needs at least {show_bytes(total)} per worker ({parts}), but only "
        f"{show_bytes(limit.num_bytes)} are available ({limit.source}); {_remedies(needs, config, limit)}"
    )


def worker_needs(config: TrainConfig, objects: UserObjects, manifest: ShardManifest) -> dict[str, int]:
    """Returns part -> lower bound of the host bytes that the worker that needs most holds at once.

    Plans one step on two rows, to find which parameters get a gradient and optimizer state.
    """
    return _needs(config, manifest, *FUNCTIONS["plan_least"](config, objects, manifest))


def _needs(
    config: TrainConfig, manifest: ShardManifest, network: nn.Module, gradients: int, state: int
) -> dict[str, int]:
    parameters = num_bytes(p for p in network.parameters() if not is_lazy(p))
    whole = parameters + num_bytes(b for b in network.buffers() if not is_lazy(b))
    on_gpu = dict.fromkeys(SHARDED_PARTS["parameters"], 0.0)
    share = on_gpu if config.use_gpu else shares(config.sync.sharding, shard_group_size(config))
    # At least one worker has an even share or more; state and gradients were planned as shards.
    parts = math.prod(config.axes[axis] for axis in ("tensor", "pipeline", "expert"))
    own = {
        "parameters": int(whole / parts * share.get("parameters", 1.0)),
        "optimizer state": int(state * share.get("optimizer_state", 1.0)),
    }
    reading = estimate_reader_bytes(config, manifest)
    # Whether a checkpoint is certain within some epoch, and at the end of an epoch before the last.
    num_steps = Steps(config.batch_sizes, manifest.select("train").num_rows).total
    in_epoch = (config.checkpoint_every_steps or num_steps) < num_steps
    after_epoch = (config.checkpoint_every_epochs or config.epochs) < config.epochs
    # Each writer copies its parameters and state while the training waits, after the gradients are freed.
    copy = {"copy for a checkpoint": (parameters // parts + state) // checkpoint_writers(config)}
    moments: list[dict[str, int]] = [
        # Every rank builds the whole network on the host, unless it can build its shard alone.
        {} if config.builds_in_parts else {"parameters": whole},
        own | {"gradients": int(gradients * share.get("gradients", 1.0))} | reading,
        own | copy | reading if in_epoch else {},
        own | copy if after_epoch else {},
    ]
    return max(moments, key=lambda parts: sum(parts.values()))


def _remedies(needs: dict[str, int], config: TrainConfig, limit: Available) -> str:
    """Suggests a change that lowers the largest part, and a change that always helps."""
    largest = max(needs, key=lambda part: needs[part])
    stages = (Zero(stage=1), Zero(stage=2), Zero(stage=3))[SHARDINGS.index(config.sync.sharding) :]
    better = next((sync for sync in reversed(stages) if _with_sync(config, sync)), None)
    if largest == "copy for a checkpoint":
        intervals = [s for s in settings_of(Recovery).values() if s.name.startswith("checkpointEvery")]
        given = [s.name for s in intervals if s.default is None and getattr(config, s.field)]
        first = f"leave {' and '.join(given)} unset" if given else "set checkpointEverySeconds=0"
    elif largest == "row groups in flight":
        first = "write the shards with smaller row_group_rows"
    elif largest == "kept rows":
        first = "set cache='disk' or cache='auto'"
    elif largest == "batches":
        first = "lower batchSize" + (" and the sizes of batchSizeSchedule" * bool(config.batch_size_schedule))
    elif config.num_workers > 1 and better is not None and len(needs) > 1:
        first = f"set sync={better!r}"
    elif needs.get("optimizer state"):
        first = "take an optimizer with less state, such as 'adafactor' or 'sgd', or a smaller model"
    else:
        first = "take a smaller model"
    fewer = "run fewer workers on a host, or " if limit.workers > 1 else ""
    return f"{first}, or {fewer}give the workers more memory{limit.how}"


def _with_sync(config: TrainConfig, sync: Sync) -> TrainConfig | None:
    """Returns the config with another `sync`; None if its other settings exclude it."""
    try:
        return replace(config, sync=sync)
    except ValueError:
        return None


def choose_cache(num_bytes: int, memory: int | None, disk: int) -> Cache:
    """Returns the first of "memory" and "disk" that has twice `num_bytes` free; "none" if neither has.

    The second half of the memory is left for activations.
    """
    if not num_bytes:
        return "none"
    if memory is not None and 2 * num_bytes <= memory:
        return "memory"
    return "disk" if 2 * num_bytes <= disk else "none"


def resolve_cache(
    config: TrainConfig, manifest: ShardManifest, rank: int, size: int, local_size: int, memory: int | None
) -> TrainConfig:
    """Resolves a `cache` of "auto" for this rank; `local_size` ranks share the disk."""
    # The reader of a training that hides rows keeps all rows, in memory or on disk.
    if config.cache != "auto" or config.hides_rows:
        return config
    num_bytes = sum(find_cached_rows(config, manifest, split, rank, size).num_bytes for split in SPLITS)
    cache = choose_cache(num_bytes, memory, disk=0)
    if num_bytes and cache == "none":  # not earlier: a host may have no folder for temporary files
        cache = choose_cache(num_bytes, memory, free_disk() // local_size)
    return replace(config, cache=cache)


def free_disk() -> int:
    """Returns the free bytes of the disk for temporary files; 0 if there is no disk, or it is a RAM disk."""
    try:
        folder = tempfile.gettempdir()
        free, device = shutil.disk_usage(folder).free, os.stat(folder).st_dev
    except OSError:
        return 0
    try:
        mounts = Path("/proc/self/mountinfo").read_text(errors="replace").splitlines()
    except OSError:  # not Linux
        return free
    number = f"{os.major(device)}:{os.minor(device)}"
    types = [line.partition(" - ")[2].split()[0] for line in mounts if line.split()[2] == number]
    return 0 if {"tmpfs", "ramfs"}.intersection(types) else free
