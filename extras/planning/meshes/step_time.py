"""The time of a step over a mesh: passes by a schedule, exchanges inside the network, the sum, the update.

    step = schedule + sum of gradients + update

The schedule is worked through action by action (`shared_cores`), so its bubble is what is left of the ranks'
time. Ranks that share the cores of their host fill each other's gaps, as far as they have something to do.
Not in it: reading of rows, validation, checkpoints, and waiting for a rank that is slower than others.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

from ringspark.estimators.collectives.base import num_bytes
from ringspark.estimators.memory.sharing import data_parallel_size, shard_group_size
from ringspark.estimators.parallel.data.gradient_sum import FLAT_BYTES
from ringspark.estimators.parallel.mesh import AXES
from ringspark.estimators.parallel.model.expert import expert_names
from ringspark.estimators.parallel.model.pipeline.actions import Action, Kind
from ringspark.estimators.parallel.model.pipeline.orders import Orders
from ringspark.estimators.training.settings.config import TrainConfig
from ringspark.extras.planning.exchange_time import ring_seconds
from ringspark.extras.planning.meshes.cut_plan import orders_of
from ringspark.extras.planning.meshes.machine import Machine
from ringspark.extras.planning.meshes.profile import Profile
from ringspark.extras.planning.meshes.shared_cores import makespan

# The backward pass, behind which a sum can hide, is about two of three parts of the passes.
_BACKWARD_SHARE = 2 / 3
# A step exchanges the weights twice, for each pass, beside the gradients.
_WEIGHTS_AND_GRADIENTS = 1.5


@dataclass(frozen=True, kw_only=True)
class StepTime:
    """Seconds of a step.

    Attributes:
        total: All of it.
        exposed: The part in which ranks exchange, inside the network and of gradients, and compute nothing.
        bubble: Share of the passes in which a rank of a pipeline waits for others.
    """

    total: float
    exposed: float
    bubble: float


def step_time(config: TrainConfig, profile: Profile, machine: Machine) -> StepTime:
    """Predicts a step.

    Args:
        config: The config with the mesh and the number of micro-batches.
    """
    workers, sizes = config.num_workers, config.axes
    crowding = machine.crowding(workers)
    orders = orders_of(config, config.gradient_accumulation)
    rows = config.batch_size / config.num_copies / config.gradient_accumulation
    ranks = {stage: rank for rank, part in enumerate(profile.network.parts) for stage in part.stages}

    def compute(action: Action) -> float:
        rank = ranks[action.stage]
        if action.kind is Kind.FORWARD:
            return machine.rates.seconds(profile.work(rank, action.stage, True, rows))
        whole = machine.rates.seconds(profile.work(rank, action.stage, False, rows))
        return whole if action.kind is Kind.BACKWARD else whole / 2

    def exchange(action: Action) -> float:
        rank = ranks[action.stage]
        seconds = 0.0
        if action.kind is not Kind.WEIGHT:
            messages = profile.messages(rank, action.stage, action.kind is Kind.FORWARD, rows)
            for axis, found in messages.items():
                # Ranks along the last axis are neighbours, and lie between those along the one before.
                reach = math.prod(sizes[other] for other in AXES[AXES.index(axis) :])
                seconds += machine.exchange(found, sizes[axis], reach)
            # Values come from the stage before, or go there as gradients.
            if arriving := profile.arriving(rank, action.stage, rows):
                seconds += machine.sending(arriving, workers)
        return seconds

    # Cores that a rank of the pipeline and those beside it, with other rows or parts, have for them.
    slots = len(orders) / crowding
    alone, _ = _passes(orders, len(ranks), slots, compute)
    # An exchange was measured with all ranks of the host at it.
    passes, used = _passes(
        orders, len(ranks), slots, lambda action: compute(action) + exchange(action) / crowding
    )
    summed = _sum_seconds(config, profile, machine)
    if not profile.network.is_pipeline and machine.hosts(workers) > 1 and _in_buckets(profile):
        summed -= min(summed, _BACKWARD_SHARE * alone / config.gradient_accumulation)
    update = _update_seconds(config, profile, machine)
    return StepTime(
        total=passes + summed + update,
        exposed=passes - alone + summed,
        bubble=max(0.0, 1 - used) if profile.network.is_pipeline else 0.0,
    )


def _passes(
    orders: Orders, num_stages: int, slots: float, cost: Callable[[Action], float]
) -> tuple[float, float]:
    """Returns the seconds of a schedule, and the share of the cores' time in which ranks work."""
    # All micro-batches are alike.
    known: dict[tuple[Kind, int], float] = {}

    def of_kind(action: Action) -> float:
        key = action.kind, action.stage
        if key not in known:
            known[key] = cost(action)
        return known[key]

    end = makespan(orders, num_stages, of_kind, slots)
    work = sum(of_kind(action) for order in orders for action in order)
    return end, work / (min(slots, len(orders)) * end)


def _sum_seconds(config: TrainConfig, profile: Profile, machine: Machine) -> float:
    """Returns the seconds of the exchange of gradients, of the rank whose exchange takes longest."""
    size = data_parallel_size(config)
    if size == 1:
        return 0.0
    axes = config.axes
    link = machine.link(size, axes["tensor"] * size)

    def of_rank(count: int, of_experts: int) -> float:
        # Ranks with other experts have other gradients.
        seconds = ring_seconds(size, count - of_experts, link)
        if of_experts:
            seconds += ring_seconds(size // axes["expert"], of_experts, link)
        if config.sync.sharding == "parameters":
            seconds *= _WEIGHTS_AND_GRADIENTS * config.gradient_accumulation
        # Into the buffer that travels: each byte is read and written.
        return seconds + 2 * count * machine.rates.byte * machine.crowding(config.num_workers)

    return max(of_rank(*found) for found in _gradients(profile))


def _update_seconds(config: TrainConfig, profile: Profile, machine: Machine) -> float:
    share = 1.0 if config.sync.sharding == "none" else 1.0 / shard_group_size(config)
    seconds = [machine.rates.seconds(rank.update_work) * share for rank in profile.many]
    crowding = machine.crowding(config.num_workers)
    return max(max(seconds), crowding * math.fsum(seconds) / len(seconds))


def _gradients(profile: Profile) -> list[tuple[int, int]]:
    """Returns the bytes of each rank's gradients, and how many of them are those of experts."""
    found = []
    for part in profile.network.parts:
        trained = {name: p for name, p in part.module.named_parameters() if p.requires_grad}
        experts = expert_names(part.module) & trained.keys()
        found.append((num_bytes(trained.values()), num_bytes(trained[name] for name in experts)))
    return found


def _in_buckets(profile: Profile) -> bool:
    """Whether gradients leave while others are still computed."""
    return max(_gradients(profile))[0] > FLAT_BYTES
