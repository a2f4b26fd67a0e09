"""Forward and backward passes of a network whose stages are on different ranks."""

from __future__ import annotations

import itertools
import json
from collections.abc import Sequence
from contextlib import nullcontext
from typing import Any, cast

import torch
from torch import nn

from ringspark.estimators.collectives import Collective
from ringspark.estimators.collectives.base import gather_bytes
from ringspark.estimators.lazy_imports import load_object
from ringspark.estimators.options.mesh import Pipeline
from ringspark.estimators.parallel.mesh import RankMesh
from ringspark.extras.model_parallel.pipeline.actions import Steps, with_arrivals
from ringspark.extras.model_parallel.pipeline.executor import Added, Context, Executor, Loss
from ringspark.extras.model_parallel.pipeline.partition import (
    count_parameters,
    measure_costs,
    partition_by_cost,
    partition_by_names,
)
from ringspark.extras.model_parallel.pipeline.schedules import Schedule, schedule_of
from ringspark.extras.model_parallel.pipeline.sections import find_streams, split_into_sections
from ringspark.extras.model_parallel.pipeline.stage import keep_stages
from ringspark.extras.model_parallel.pipeline.ties import TiedGradients, find_ties
from ringspark.extras.model_parallel.pipeline.transfers import StagePlacement
from ringspark.extras.model_parallel.pipeline.wire import PointToPoint, Wire
from ringspark.models.chain import Link, links_of
from ringspark.models.meta_device import copy_to_meta
from ringspark.models.reports import CountingLayerInfo, find_counting_layers

# Runs schedules without a flush.
DELAYED_PASSES = "ringspark.extras.model_parallel.pipeline.delayed_passes:DelayedPasses"


def build_pipeline(
    network: nn.Module,
    mesh: RankMesh,
    options: Pipeline,
    num_micro: int = 1,
    sample: Sequence[torch.Tensor] | None = None,
    device: torch.device | None = None,
) -> PipelinePasses:
    """Partitions the network, in place, and leaves this rank's stages. Runs on every rank.

    Args:
        network: The whole network, with equal weights on all ranks.
        num_micro: Largest number of micro-batches per step; only schedules without a flush use it.
        sample: Rank 0's arguments of one micro-batch, to count operations; None counts parameters.
    """
    schedule = schedule_of(options.schedule, options.virtual)
    collective = mesh.axes["pipeline"]
    owners = schedule.owners(collective.size, options.virtual)
    links = links_of(network)
    if options.cuts:
        bounds = partition_by_names(links, len(owners), options.cuts)
    else:
        costs: list[float] = []
        if mesh.world.rank == 0:
            counts = [float(count) for count in count_parameters(network, links)]
            costs = (None if sample is None else _measure(network, links, sample)) or counts
        # Samples of padded texts differ between ranks, but all ranks must agree.
        shared = gather_bytes(mesh.world, json.dumps(costs).encode())[0]
        bounds = partition_by_cost(links, len(owners), json.loads(shared))
    stages = [links[begin:end] for begin, end in itertools.pairwise(bounds)]
    ties = find_ties(network, stages, owners)
    layers = find_counting_layers(network)
    keep_stages(network, {s: own for s, own in enumerate(stages) if owners[s] == collective.rank})
    place = _place_stages(collective.rank, owners, stages, options)
    kind = PipelinePasses if schedule.delays is None else load_object(DELAYED_PASSES)
    passes: PipelinePasses = kind(
        network,
        collective,
        place,
        schedule,
        num_micro,
        TiedGradients(network, ties, cast(PointToPoint, collective), collective.rank),
        device or torch.device("cpu"),
        layers,
    )
    return passes


def _place_stages(
    rank: int, owners: Sequence[int], stages: Sequence[Sequence[Link]], options: Pipeline
) -> StagePlacement:
    streams = find_streams(stages, options.sequence_chunks)
    if options.sequence_chunks > 1 and not any(streams):
        raise ValueError(
            "Pipeline's sequence_chunks needs a stage that begins between two layers that support sequence "
            f"chunks, but the stages begin at {', '.join(stage[0].name for stage in stages)}; set "
            "Pipeline's cuts, or leave sequence_chunks out"
        )
    sections = [
        split_into_sections(stage, streams_in=number > 0 and streams[number - 1], streams_out=streams[number])
        for number, stage in enumerate(stages)
    ]
    return StagePlacement(
        rank=rank,
        owners=owners,
        firsts=[stage[0].name for stage in stages],
        streams=streams,
        sections=sections,
        time_chunks=options.sequence_chunks,
    )


def add_nothing(index: int) -> None:
    return


class PipelinePasses:
    """The passes of one rank. All ranks of the pipeline make the same calls, with the same rows.

    Attributes:
        network: The network with only this rank's stages.
        module: The module to call in training: the network, or a wrapper that passes on the keyword `stage`.
        tied: Names of this rank's parameters that other ranks of the pipeline hold too.
        copies: Names of the tied parameters that another rank owns.
        layers: Layers of the whole network that count something over their rows, in order.
        stages: Numbers of this rank's stages.
        steps_in_flight: Number of steps whose gradients are still to come; equal on all ranks. If there are
            any, `drain` is needed before a validation or a checkpoint.
    """

    def __init__(
        self,
        network: nn.Module,
        collective: Collective,
        place: StagePlacement,
        schedule: Schedule,
        num_micro: int,
        ties: TiedGradients,
        device: torch.device,
        layers: Sequence[CountingLayerInfo] = (),
    ) -> None:
        self.network = network
        self.layers = tuple(layers)
        self.module = network
        self.tied, self.copies = ties.names, ties.copies
        self.num_stages = len(place.owners)
        self.stages = [stage for stage in range(self.num_stages) if place.is_own(stage)]
        self._place = place
        self._ties = ties
        self._schedule, self._num_micro = schedule, num_micro
        self._num_ranks, self.virtual = collective.size, len(self.stages)
        self.executor = Executor(place, Wire(cast(PointToPoint, collective), device))
        collective.on_leave(self.executor.drop)
        self._plans: dict[int, Steps] = {}

    @property
    def has_outputs(self) -> bool:
        return self._place.is_own(self._place.last)

    @property
    def steps_in_flight(self) -> int:
        return 0

    def train(
        self,
        micro_batches: Sequence[Sequence[torch.Tensor]],
        loss: Loss,
        around: Context = nullcontext,
        added: Added = add_nothing,
    ) -> None:
        """Adds the gradients of a step to `.grad`, summed over micro-batches.

        A schedule without a flush adds the gradients of an earlier step, so the first calls may add none.

        Args:
            micro_batches: The network's arguments; empty if this replica has no rows in this step. If layers
                communicate with other replicas, all replicas give equally many; some may have no rows.
            loss: (outputs, number of the micro-batch) -> scalar to differentiate, in the last stage.
            added: (number of the micro-batch) -> scalar that a stage before the last adds to the loss.
        """
        if micro_batches:
            self.executor.around = around
            self.executor.train(self.module, self._plan(len(micro_batches)), micro_batches, loss, added)
            self._ties.add()

    def drain(self) -> None:
        """Adds the gradients of a step in flight to `.grad`, if one is in flight."""

    def evaluate(self, inputs: Sequence[torch.Tensor], around: Context = nullcontext) -> Any:
        """Returns the network's outputs on the rank of the last stage, None elsewhere; without gradients."""
        self.executor.around = around
        with torch.no_grad():
            return self.executor.evaluate(self.network, self.stages, inputs)

    def share_ties(self) -> None:
        """Overwrites copies of tied parameters with their owner's. Runs on every rank of the pipeline."""
        with torch.no_grad():
            self._ties.share()

    def _plan(self, num_micro: int) -> Steps:
        if num_micro not in self._plans:
            orders = self._schedule.orders_by_rank(self._num_ranks, self.virtual, num_micro)
            self._plans[num_micro] = with_arrivals(orders, self._place.owners)[self._place.rank]
        return self._plans[num_micro]


def _measure(network: nn.Module, links: Sequence[Link], sample: Sequence[torch.Tensor]) -> list[float] | None:
    """Returns the layers' costs, or None if a meta-device network cannot run because it needs real values."""
    if not any(p.is_meta for p in network.parameters()):
        return measure_costs(network, links, sample)
    empty = copy_to_meta(network)
    try:
        return measure_costs(empty, links_of(empty), [values.to("meta") for values in sample])
    except Exception:  # of any kind, depending on the network
        return None
