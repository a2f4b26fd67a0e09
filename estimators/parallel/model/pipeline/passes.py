"""Forward and backward passes of a network whose stages lie on different ranks."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import nn

from ringspark.estimators.collectives import Collective
from ringspark.estimators.collectives.base import gather_bytes
from ringspark.estimators.lazy_imports import load_object
from ringspark.estimators.parallel.mesh import RankMesh
from ringspark.estimators.parallel.model.pipeline.actions import Steps, with_arrivals
from ringspark.estimators.parallel.model.pipeline.cutting import (
    cut_by_names,
    cut_stages,
    measured_costs,
    parameter_counts,
)
from ringspark.estimators.parallel.model.pipeline.exchange import Place
from ringspark.estimators.parallel.model.pipeline.executor import Added, Context, Executor, Loss
from ringspark.estimators.parallel.model.pipeline.schedules import Schedule, schedule_of
from ringspark.estimators.parallel.model.pipeline.sections import sections_of, streams_of
from ringspark.estimators.parallel.model.pipeline.stage import keep_stages
from ringspark.estimators.parallel.model.pipeline.ties import TiedGradients, find_ties
from ringspark.estimators.parallel.model.pipeline.timeline import Timed
from ringspark.estimators.parallel.model.pipeline.wire import PointToPoint, Wire
from ringspark.models.chain import Link, links_of
from ringspark.models.meta_device import copy_to_meta
from ringspark.models.reports import CountingLayerInfo, find_counting_layers

# Runs stages that pass values to each other in chunks of the sequence.
CHUNKED_EXECUTOR = "ringspark.extras.schedules.chunked_executor:ChunkedExecutor"


@dataclass(frozen=True, kw_only=True)
class PipelineOptions:
    """How a network is cut into stages and run.

    Attributes:
        schedule: A name in `SCHEDULES`.
        virtual: Stages a rank.
        cuts: Names of the links that begin the second and later stages; none cuts by cost.
        num_micro: Micro-batches of a step; a step may have fewer. Only schedules without a flush ask for it.
        time_chunks: Chunks of time in which values pass between stages that go along time.
    """

    schedule: str = "1f1b"
    virtual: int = 1
    cuts: Sequence[str] = ()
    num_micro: int = 1
    time_chunks: int = 1


def pipelined(
    network: nn.Module,
    mesh: RankMesh,
    options: PipelineOptions,
    sample: Sequence[torch.Tensor] | None = None,
    device: torch.device | None = None,
) -> PipelinePasses:
    """Cuts the network in place and leaves this rank's stages of it. Runs on every rank.

    Args:
        network: The whole network, with equal weights on all ranks.
        sample: Arguments of one micro-batch, by which the operations of every link are counted; only the
            first rank's are looked at. None cuts by the numbers of parameters.
        device: Device of the network.

    Raises:
        ValueError: The network is no chain, has too few links, or the options do not fit.
    """
    schedule = schedule_of(options.schedule, options.virtual)
    collective = mesh.axes["pipeline"]
    owners = schedule.owners(collective.size, options.virtual)
    links = links_of(network)
    if options.cuts:
        bounds = cut_by_names(links, len(owners), options.cuts)
    else:
        costs: list[float] = []
        if mesh.world.rank == 0:
            counts = [float(count) for count in parameter_counts(network, links)]
            costs = (None if sample is None else _measured(network, links, sample)) or counts
        # Padded texts have other lengths on other ranks, and all must cut alike.
        bounds = cut_stages(links, len(owners), _of_first_rank(mesh.world, costs))
    stages = [links[begin:end] for begin, end in itertools.pairwise(bounds)]
    ties = find_ties(network, stages, owners)
    layers = find_counting_layers(network)
    keep_stages(network, {s: own for s, own in enumerate(stages) if owners[s] == collective.rank})
    place = _place(collective.rank, owners, stages, schedule, options)
    kind = PipelinePasses if schedule.passes is None else load_object(schedule.passes)
    passes: PipelinePasses = kind(
        network,
        collective,
        place,
        schedule,
        options,
        TiedGradients(network, ties, cast(PointToPoint, collective), collective.rank),
        device or torch.device("cpu"),
        layers,
    )
    return passes


def _place(
    rank: int,
    owners: Sequence[int],
    stages: Sequence[Sequence[Link]],
    schedule: Schedule,
    options: PipelineOptions,
) -> Place:
    streams = streams_of(stages, options.time_chunks)
    if options.time_chunks > 1 and not any(streams):
        raise ValueError(
            "parallelism's 'time_chunks' needs a cut between two links that go along time, and the stages "
            f"begin at {', '.join(stage[0].name for stage in stages)}; name others by parallelism's 'cuts', "
            "or leave 'time_chunks' out"
        )
    if any(streams) and schedule.splits:
        raise ValueError(
            f"parallelism's 'time_chunks' does not go with schedule {options.schedule!r}, which splits "
            "backward passes; set schedule='1f1b'"
        )
    sections = [
        sections_of(stage, streams_in=number > 0 and streams[number - 1], streams_out=streams[number])
        for number, stage in enumerate(stages)
    ]
    return Place(
        rank=rank,
        owners=owners,
        firsts=[stage[0] for stage in stages],
        streams=streams,
        sections=sections,
        time_chunks=options.time_chunks,
    )


def nothing_added(index: int) -> None:
    return


class PipelinePasses:
    """The passes of one rank. All ranks of the pipeline make the same calls, on the same rows.

    Attributes:
        network: The network, of which only this rank's stages are left.
        module: What is called in training: the network, or a wrapper around it, which passes on the keyword
            `stage`.
        copies: Names of this rank's parameters that another rank owns: tied ones, which norms and checkpoints
            count there.
        layers: The whole network's layers that count something, in its order.
        num_stages: Number of stages of all ranks.
        stages: Numbers of this rank's stages.
        virtual: How many they are.
        late: Whether gradients belong to an earlier step, so that `drain` is needed before a validation or
            a checkpoint.
        steps_in_flight: Number of steps whose gradients are still to come; equal on all ranks that took the
            same steps.
    """

    def __init__(
        self,
        network: nn.Module,
        collective: Collective,
        place: Place,
        schedule: Schedule,
        options: PipelineOptions,
        ties: TiedGradients,
        device: torch.device,
        layers: Sequence[CountingLayerInfo] = (),
    ) -> None:
        self.network = network
        self.layers = tuple(layers)
        self.module = network
        self.copies = ties.copies
        self.num_stages = len(place.owners)
        self.stages = [stage for stage in range(self.num_stages) if place.is_own(stage)]
        self._place = place
        self._ties = ties
        self._schedule = schedule
        self._num_ranks, self.virtual = collective.size, options.virtual
        executor = load_object(CHUNKED_EXECUTOR) if any(place.streams) else Executor
        self._executor: Executor = executor(place, Wire(cast(PointToPoint, collective), device))
        collective.on_leave(self._executor.drop)
        self._plans: dict[int, Steps] = {}
        self.late = False

    @property
    def has_outputs(self) -> bool:
        """Whether this rank has the last stage."""
        return self._place.is_own(self._place.last)

    @property
    def steps_in_flight(self) -> int:
        return 0

    @property
    def most_live(self) -> int:
        """Most micro-batches whose activations this rank held at a time."""
        return self._executor.most_live

    @property
    def timeline(self) -> list[Timed] | None:
        """What this rank did, if it is recorded."""
        return self._executor.recorder.actions

    def record(self) -> None:
        """Begins a new timeline."""
        self._executor.recorder.actions = []

    def train(
        self,
        micro_batches: Sequence[Sequence[torch.Tensor]],
        loss: Loss,
        around: Context = nullcontext,
        added: Added = nothing_added,
    ) -> bool:
        """Adds the gradients of a step to `.grad`, summed over the micro-batches and not divided.

        Args:
            micro_batches: The network's arguments; none if this copy of the network has no rows in this step.
                Where layers exchange with other copies, all have as many, some of which may be of no rows.
            loss: Gets the network's outputs and the number of the micro-batch, and returns a scalar that is
                differentiated. Called where the last stage is, once for each micro-batch, and nowhere else.
            around: Makes the context of every forward pass.
            added: Called after the forward pass of every other stage here; returns what it adds to the loss.

        Returns:
            Whether there are gradients: not if the step has no rows. Of a schedule without a flush they are
            those of an earlier step, and there are none in the first steps.
        """
        if not micro_batches:
            return False
        self._executor.around = around
        self._executor.train(self.module, self._plan(len(micro_batches)), micro_batches, loss, added)
        self._ties.add()
        return True

    def drain(self) -> bool:
        """Adds the gradients of one step that are still to come.

        Called `steps_in_flight` times, with a step of the optimizer after each.

        Returns:
            Like `train`.
        """
        return False

    def evaluate(self, inputs: Sequence[torch.Tensor], around: Context = nullcontext) -> Any:
        """Returns the network's outputs where the last stage is, None elsewhere; computes no gradients.

        A rank returns before the ranks after it have finished. What it sent last may be under way until the
        next exchange with them.
        """
        self._executor.around = around
        with torch.no_grad():
            return self._executor.evaluate(self.network, self.stages, inputs)

    def finish(self) -> None:
        """Waits until everything that this rank sends has left."""
        self._executor.finish()

    def share_ties(self) -> None:
        """Overwrites copies of tied parameters by their owner's. Runs on every rank of the pipeline."""
        with torch.no_grad():
            self._ties.share()

    def _plan(self, num_micro: int) -> Steps:
        if num_micro not in self._plans:
            orders = self._schedule.orders_by_rank(self._num_ranks, self.virtual, num_micro)
            self._plans[num_micro] = with_arrivals(orders, self._place.owners)[self._place.rank]
        return self._plans[num_micro]


def _measured(
    network: nn.Module, links: Sequence[Link], sample: Sequence[torch.Tensor]
) -> list[float] | None:
    """Returns the costs of links; None for a network without numbers that cannot run without them."""
    if not any(p.is_meta for p in network.parameters()):
        return measured_costs(network, links, sample)
    empty = copy_to_meta(network)
    try:
        return measured_costs(empty, links_of(empty), [values.to("meta") for values in sample])
    except Exception:  # of any kind: what a forward pass meets there depends on the network
        return None


def _of_first_rank(world: Collective, numbers: Sequence[float]) -> list[float]:
    """Returns the first rank's numbers. Runs on every rank."""
    mine = torch.tensor(list(numbers), dtype=torch.float64).numpy().tobytes()
    first = gather_bytes(world, mine)[0]
    return list(torch.frombuffer(bytearray(first), dtype=torch.float64).tolist())
