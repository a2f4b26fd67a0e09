"""A network as a mesh leaves it to each rank of one copy: modules without weights, and who has which stages.

Ranks that differ along an axis that cuts tensors or rows have parts of one size, or smaller ones by one
place: the first, which has the largest, stands for all. So does it along 'expert', where each expert is
taken to get as many tokens as any other: which ones it gets is known from numbers alone.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import nn

from ringspark.estimators.memory.columns import BatchColumn
from ringspark.estimators.options.mesh import Mesh
from ringspark.estimators.parallel.model.expert import spread_experts
from ringspark.estimators.parallel.model.pipeline.cutting import (
    cut_by_names,
    cut_stages,
    measured_costs,
    parameter_counts,
)
from ringspark.estimators.parallel.model.pipeline.schedules import schedule_of
from ringspark.estimators.parallel.model.pipeline.stage import keep_stages
from ringspark.estimators.parallel.model.sequence.spread import spread_sequence
from ringspark.estimators.parallel.model.stand_in import StandIn
from ringspark.estimators.parallel.model.tensor import (
    plan_of,
    region_of,
    spread_between,
    spread_tensor,
)
from ringspark.estimators.training.check.probe import PROBE_ROWS
from ringspark.models.chain import links_of
from ringspark.models.meta_device import copy_to_meta


@dataclass(frozen=True, kw_only=True)
class RankPart:
    """What one rank of a pipeline has.

    Attributes:
        module: The network without weights, with this rank's stages and parts.
        stages: Numbers of its stages; without a pipeline, 0.
    """

    module: nn.Module
    stages: tuple[int, ...]


@dataclass(frozen=True, kw_only=True)
class CutNetwork:
    """One copy of a network on its ranks.

    Attributes:
        whole: The network with its tensors cut, and all stages.
        parts: One for each rank of the pipeline, in their order: the first has the last stage.
        owners: Rank of each stage.
        firsts: Name of the link that begins each stage; "" without a pipeline.
        stand_ins: Collective of each axis along which ranks exchange inside the network.
    """

    whole: nn.Module
    parts: tuple[RankPart, ...]
    owners: tuple[int, ...]
    firsts: tuple[str, ...]
    stand_ins: Mapping[str, StandIn]

    @property
    def is_pipeline(self) -> bool:
        return len(self.owners) > 1


def cut_network(
    empty: nn.Module, sizes: Mapping[str, int], options: Mesh, inputs: Sequence[BatchColumn]
) -> CutNetwork:
    """Cuts a network as `spread` does on every rank.

    Args:
        empty: The network without weights; not changed.
        sizes: Number of ranks along each axis.
        options: The setting `parallelism`.
        inputs: Arguments of `forward`.

    Raises:
        ValueError: The network cannot be cut that way.
    """
    whole = copy_to_meta(empty)
    stand_ins: dict[str, StandIn] = {}
    if sizes["tensor"] > 1:
        stand_ins["tensor"] = stand_in = StandIn(0, sizes["tensor"])
        plan = options.plan or plan_of(whole, sizes["tensor"])
        region = region_of(stand_in, "parts" if options.sequence_parallel else "whole")  # type: ignore[arg-type]
        spread_tensor(whole, region, plan)
    if sizes["expert"] > 1:
        stand_ins["expert"] = stand_in = StandIn(0, sizes["expert"])
        spread_experts(whole, stand_in)  # type: ignore[arg-type]
    if sizes["sequence"] > 1:
        stand_ins["sequence"] = stand_in = StandIn(0, sizes["sequence"])
        spread_sequence(whole, stand_in, options.context)  # type: ignore[arg-type]
    if sizes["tensor"] > 1:
        spread_between(whole, region)
    if sizes["pipeline"] == 1:
        alone = RankPart(module=whole, stages=(0,))
        return CutNetwork(whole=whole, parts=(alone,), owners=(0,), firsts=("",), stand_ins=stand_ins)
    way = options.pipeline
    owners = schedule_of(way.schedule, way.virtual).owners(sizes["pipeline"], way.virtual)
    links = links_of(whole)
    if way.cuts:
        bounds = cut_by_names(links, len(owners), way.cuts)
    else:
        costs = link_costs(whole, inputs, PROBE_ROWS) if not stand_ins else _counts(whole)
        bounds = cut_stages(links, len(owners), costs)
    parts = []
    for rank in range(sizes["pipeline"]):
        module = copy_to_meta(whole)
        own = links_of(module)
        stages = {s: own[bounds[s] : bounds[s + 1]] for s, owner in enumerate(owners) if owner == rank}
        keep_stages(module, stages)
        parts.append(RankPart(module=module, stages=tuple(stages)))
    return CutNetwork(
        whole=whole,
        parts=tuple(parts),
        owners=tuple(owners),
        firsts=tuple(links[begin].name for begin in bounds[:-1]),
        stand_ins=stand_ins,
    )


def link_costs(empty: nn.Module, inputs: Sequence[BatchColumn], rows: int) -> list[float]:
    """Returns the cost of each link of a whole network for so many rows, as pipelines are cut by it."""
    sample = [torch.empty((rows, *c.shape[1:]), dtype=c.dtype, device="meta") for c in inputs]
    return measured_costs(empty, links_of(empty), sample)


def _counts(whole: nn.Module) -> list[float]:
    return [float(count) for count in parameter_counts(whole, links_of(whole))]
