"""Shards a network on `meta` for each rank of one replica, as the mesh would.

Along 'tensor' and 'sequence', rank 0 has the largest shards, so only its shards are computed. Along 'expert',
every rank is assumed to get the same number of tokens, because the real numbers depend on values.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import nn

from ringspark.estimators.options.mesh import MODEL_AXES, Mesh
from ringspark.estimators.training.check.probe import PROBE_ROWS
from ringspark.extras.model_parallel.fake_collective import FakeCollective
from ringspark.extras.model_parallel.pipeline.partition import (
    count_parameters,
    measure_costs,
    partition_by_cost,
    partition_by_names,
)
from ringspark.extras.model_parallel.pipeline.schedules import schedule_of
from ringspark.extras.model_parallel.pipeline.stage import keep_stages
from ringspark.extras.model_parallel.shard_network import LAYER_AXES, shard_inside
from ringspark.extras.planning.memory.columns import BatchColumn
from ringspark.models.chain import links_of
from ringspark.models.meta_device import copy_to_meta


@dataclass(frozen=True, kw_only=True)
class CutNetwork:
    """One replica of a network, sharded over its ranks, on `meta`.

    Attributes:
        whole: The network with all stages and with sharded tensors.
        parts: The network of each rank, with its stages only.
        owners: For each stage, the rank that has it; without a pipeline there is only stage 0.
        bounds: Index of the first block of each stage, then the number of blocks; () without a pipeline.
        fakes: Fake process group of each axis that communicates inside the network.
    """

    whole: nn.Module
    parts: Sequence[nn.Module]
    owners: Sequence[int] = (0,)
    bounds: Sequence[int] = ()
    fakes: Mapping[str, FakeCollective]

    @property
    def is_pipeline(self) -> bool:
        return len(self.owners) > 1


def cut_network(
    empty: nn.Module, sizes: Mapping[str, int], options: Mesh, inputs: Sequence[BatchColumn]
) -> CutNetwork:
    """Shards a copy of a network on `meta` in the same way as `shard_network` does on every rank.

    Raises:
        ValueError: The network cannot be sharded in this way.
    """
    whole = copy_to_meta(empty) if max(sizes[axis] for axis in MODEL_AXES) > 1 else empty
    fakes = {axis: FakeCollective(0, sizes[axis]) for axis in LAYER_AXES if sizes[axis] > 1}
    shard_inside(whole, fakes, options)
    if sizes["pipeline"] == 1:
        return CutNetwork(whole=whole, parts=(whole,), fakes=fakes)
    way = options.pipeline
    owners = schedule_of(way.schedule, way.virtual).owners(sizes["pipeline"], way.virtual)
    links = links_of(whole)
    if way.cuts:
        bounds = partition_by_names(links, len(owners), way.cuts)
    else:
        counts = count_parameters(whole, links) if fakes else []
        costs = counts or link_costs(whole, inputs, PROBE_ROWS)
        bounds = partition_by_cost(links, len(owners), costs)
    parts = []
    for rank in range(sizes["pipeline"]):
        module = copy_to_meta(whole)
        own = links_of(module)
        keep_stages(module, {s: own[bounds[s] : bounds[s + 1]] for s, o in enumerate(owners) if o == rank})
        parts.append(module)
    return CutNetwork(whole=whole, parts=parts, owners=owners, bounds=bounds, fakes=fakes)


def link_costs(empty: nn.Module, inputs: Sequence[BatchColumn], rows: int) -> list[float]:
    """Returns each layer's cost for `rows` rows; a pipeline divides the network by these costs."""
    sample = [torch.empty((rows, *c.shape[1:]), dtype=c.dtype, device="meta") for c in inputs]
    return measure_costs(empty, links_of(empty), sample)
