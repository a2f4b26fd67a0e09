"""Rules for each axis of a mesh: returns why a network cannot have so many ranks along it, or ""."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from torch import nn

from ringspark.estimators.parallel.model.shard_network import check_shardable
from ringspark.estimators.training.settings.config import TrainConfig
from ringspark.models.chain import links_of
from ringspark.models.experts.layer import MixtureOfExperts
from ringspark.models.meta_device import copy_to_meta


@dataclass(frozen=True, kw_only=True)
class Spreadable:
    """A training to distribute.

    Attributes:
        config: The settings; `batch_size` counts the rows of a step over all workers.
        network: The network on `meta`; not changed.
    """

    config: TrainConfig
    network: nn.Module


def along_data(given: Spreadable, size: int) -> str:
    rows = given.config.batch_size
    return "" if size <= rows else f"a batch of {rows:,} rows is too small for {size:,} workers"


def along_shard(given: Spreadable, size: int) -> str:
    if given.config.sync.sharding != "parameters":
        return "'shard' needs sharding='parameters'"
    return along_data(given, size)


def along_tensor(given: Spreadable, size: int) -> str:
    return spread_refusal(given, {"tensor": size})


def along_pipeline(given: Spreadable, size: int) -> str:
    found: list[int] = []
    refusal = _refusal(lambda: found.append(len(links_of(given.network))))
    if refusal:
        return refusal
    if found[0] < size:
        return f"the network has {found[0]:,} links for {size:,} stages"
    return ""


def along_sequence(given: Spreadable, size: int) -> str:
    return spread_refusal(given, {"sequence": size})


def along_expert(given: Spreadable, size: int) -> str:
    if given.config.sync.sharding != "none":
        return f"meshes over 'expert' are not planned with sharding={given.config.sync.sharding!r}"
    if not has_experts(given.network):
        return "the network has no experts"
    return along_data(given, size) or spread_refusal(given, {"expert": size})


def has_experts(network: nn.Module) -> bool:
    return any(isinstance(layer, MixtureOfExperts) for layer in network.modules())


# Axis -> (training, number of ranks along the axis) -> why it is not possible, or "".
AXIS_RULES: dict[str, Callable[[Spreadable, int], str]] = {
    "data": along_data,
    "shard": along_shard,
    "tensor": along_tensor,
    "pipeline": along_pipeline,
    "sequence": along_sequence,
    "expert": along_expert,
}
PLANNED_AXES = ("data", "tensor", "pipeline", "sequence", "expert")


def spread_refusal(given: Spreadable, sizes: Mapping[str, int]) -> str:
    """Returns why the network cannot be sharded along all these axes together, or ""."""
    full = dict.fromkeys(AXIS_RULES, 1) | dict(sizes)
    return _refusal(lambda: check_shardable(copy_to_meta(given.network), full, given.config.parallelism))


def _refusal(check: Callable[[], object]) -> str:
    try:
        check()
    except ValueError as error:
        return str(error)
    return ""
