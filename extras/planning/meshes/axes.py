"""Whether, and how far, a network can be spread along each axis of a mesh."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from torch import nn

from ringspark.estimators.parallel.model.spread import check_spread
from ringspark.estimators.training.settings.config import TrainConfig
from ringspark.models.chain import links_of
from ringspark.models.experts.layer import MixtureOfExperts
from ringspark.models.meta_device import copy_to_meta


@dataclass(frozen=True, kw_only=True)
class Spreadable:
    """What is to be spread.

    Attributes:
        config: The settings, with `batch_size` rows in each step over all workers.
        network: The network without weights; not changed.
    """

    config: TrainConfig
    network: nn.Module


def along_data(given: Spreadable, size: int) -> str:
    """Every rank needs a row of each batch."""
    rows = given.config.batch_size
    return "" if size <= rows else f"a batch of {rows:,} rows has none for some of {size:,} workers"


def along_shard(given: Spreadable, size: int) -> str:
    """Ranks with parts of the weights read other rows, and the strategy that gathers them must be chosen."""
    if given.config.sync.sharding != "parameters":
        return "'shard' needs sharding='parameters'"
    return along_data(given, size)


def along_tensor(given: Spreadable, size: int) -> str:
    """Layers are cut by a plan: of whole heads, and no finer than a layer has columns."""
    return spread_refusal(given, {"tensor": size})


def along_pipeline(given: Spreadable, size: int) -> str:
    """Each rank needs a link of the chain, and a step the rows for more than one micro-batch."""
    found: list[int] = []
    refusal = _refusal(lambda: found.append(len(links_of(given.network))))
    if refusal:
        return refusal
    if found[0] < size:
        return f"the network has {found[0]:,} links for {size:,} stages"
    return ""


def along_sequence(given: Spreadable, size: int) -> str:
    """A network over tokens asks `rows` for its own, and its attention takes those of other ranks."""
    return spread_refusal(given, {"sequence": size})


def along_expert(given: Spreadable, size: int) -> str:
    """Each rank needs an expert of every mixture, and rows; a sharding cuts experts over fewer ranks."""
    if given.config.sync.sharding != "none":
        return f"meshes over 'expert' are not planned with sharding={given.config.sync.sharding!r}"
    if not has_experts(given.network):
        return "the network has no experts"
    return along_data(given, size) or spread_refusal(given, {"expert": size})


def has_experts(network: nn.Module) -> bool:
    """Whether a network has mixtures of experts."""
    return any(isinstance(layer, MixtureOfExperts) for layer in network.modules())


# Axis -> (network, number of ranks along it) -> why it cannot be spread so, "" if it can.
AXIS_RULES: dict[str, Callable[[Spreadable, int], str]] = {
    "data": along_data,
    "shard": along_shard,
    "tensor": along_tensor,
    "pipeline": along_pipeline,
    "sequence": along_sequence,
    "expert": along_expert,
}
# Those of which candidates are made.
PLANNED_AXES = ("data", "tensor", "pipeline", "sequence", "expert")


def spread_refusal(given: Spreadable, sizes: Mapping[str, int]) -> str:
    """Returns why the network cannot be cut along all these axes at a time; "" if it can."""
    full = dict.fromkeys(AXIS_RULES, 1) | dict(sizes)
    return _refusal(lambda: check_spread(copy_to_meta(given.network), full, given.config.parallelism))


def _refusal(check: Callable[[], object]) -> str:
    try:
        check()
    except ValueError as error:
        return str(error)
    return ""
