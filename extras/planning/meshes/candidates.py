"""Lists all meshes of a number of workers; `refusal` says why a network cannot use a mesh."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from typing import Any

from torch import nn

from ringspark.estimators.options.mesh import AXES, MODEL_AXES, Mesh
from ringspark.estimators.training.settings.config import TrainConfig
from ringspark.extras.experts.layer import MixtureOfExperts
from ringspark.extras.model_parallel.shard_network import LAYER_AXES, check_shardable
from ringspark.extras.planning.meshes.report import MeshPlan, name_options
from ringspark.models.chain import links_of
from ringspark.models.meta_device import copy_to_meta

# Largest number of micro-batches to try, per stage of a pipeline.
MOST_MICRO_BATCHES = 8


def explain_refusal(config: TrainConfig, network: nn.Module, axis: str, size: int) -> str:
    """Returns the reason why a network on `meta` cannot have `size` ranks along an axis; "" if it can."""
    rows, sharding = config.batch_size, config.sync.sharding
    if axis == "shard" and sharding != "parameters":
        return "'shard' needs sharding='parameters'"
    if axis == "expert" and sharding != "none":
        return f"meshes over 'expert' are not planned with sharding={sharding!r}"
    if axis == "expert" and not _has_experts(network):
        return "the network has no experts"
    if axis in ("data", "shard", "expert") and size > rows:
        return f"a batch of {rows:,} rows is too small for {size:,} workers"
    if axis == "pipeline":
        try:
            count = len(links_of(network))
        except ValueError as error:
            return str(error)
        return "" if count >= size else f"the network has {count:,} blocks, too few for {size:,} stages"
    return _shard_refusal(config, network, {axis: size}) if axis in LAYER_AXES else ""


def _has_experts(network: nn.Module) -> bool:
    return any(isinstance(layer, MixtureOfExperts) for layer in network.modules())


def _shard_refusal(config: TrainConfig, network: nn.Module, sizes: Mapping[str, int]) -> str:
    full = dict.fromkeys(AXES, 1) | dict(sizes)
    return _error_of(check_shardable, copy_to_meta(network), full, config.parallelism)


def _error_of(check: Callable[..., object], *arguments: object) -> str:
    try:
        check(*arguments)
    except ValueError as error:
        return str(error)
    return ""


def candidates(
    config: TrainConfig, network: nn.Module, workers: int, *, interleaves: bool = True
) -> list[MeshPlan]:
    """Returns all meshes, possible or refused, without predictions; data parallelism comes first.

    Args:
        config: The settings. `batch_size` is the number of rows of a step over all workers.
        interleaves: Whether to also try pipelines with several stages per worker, which have smaller bubbles.
    """
    # With sharded weights, 'shard' replaces 'data': the weights are sharded over all ranks with different
    # rows.
    rows_axis = "shard" if config.sync.sharding == "parameters" else "data"
    # Do not list meshes over 'sequence' or 'expert' for networks without tokens or experts.
    skipped = {"sequence": not hasattr(network, "rows"), "expert": not _has_experts(network)}
    inside = [axis for axis in MODEL_AXES if not skipped.get(axis)]
    refusals: dict[tuple[str, int], str] = {}
    found: list[MeshPlan] = []
    for shape in _factorizations(workers, 1 + len(inside)):
        named = zip((rows_axis, *inside), shape, strict=True)
        sizes = {axis: size for axis, size in named if size > 1}
        for axis, size in sizes.items():
            if (axis, size) not in refusals:
                refusals[axis, size] = explain_refusal(config, network, axis, size)
        refusal = next((refusals[pair] for pair in sizes.items() if refusals[pair]), "")
        if not refusal and len(sizes.keys() - {rows_axis}) > 1:
            refusal = _shard_refusal(config, network, sizes)
        schedules: list[dict[str, Any]] = [{}]
        stages = sizes.get("pipeline", 1)
        if not refusal and stages > 1:
            schedules = [{"schedule": "1f1b"}]
            if interleaves and not explain_refusal(config, network, "pipeline", 2 * stages):
                schedules.append({"schedule": "interleaved", "virtual": 2})
        for options in schedules:
            own = refusal or _error_of(with_mesh, config, workers, name_options(sizes, options), 1)
            found.append(MeshPlan(sizes=sizes, options=options, refusal=own))
    return sorted(found, key=lambda mesh: math.prod(mesh.sizes.get(axis, 1) for axis in MODEL_AXES))


def micro_batches(mesh: MeshPlan, rows: int, given: int | None) -> list[int]:
    """Returns the numbers of micro-batches to try for `rows` rows per replica, or only `given`."""
    if given is not None:
        return [given] if given <= rows else []
    least = max(1, min(mesh.sizes.get("pipeline", 1), rows))
    counts = (least * 2**power for power in range(MOST_MICRO_BATCHES.bit_length()))
    return [count for count in counts if count <= rows]


def with_mesh(
    config: TrainConfig, workers: int, parallelism: Mapping[str, Any], num_micro: int
) -> TrainConfig:
    """Returns the config with a mesh; raises ValueError if a setting excludes the mesh."""
    return replace(
        config,
        num_workers=workers,
        parallelism=Mesh.of({"plan": config.parallelism.plan, **parallelism}),
        gradient_accumulation=num_micro,
    )


def _factorizations(number: int, count: int) -> Iterator[tuple[int, ...]]:
    if count == 1:
        yield (number,)
        return
    for first in range(number, 0, -1):
        if number % first == 0:
            for rest in _factorizations(number // first, count - 1):
                yield (first, *rest)
