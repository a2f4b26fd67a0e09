"""Predicts the time of a step on a mesh: the schedule, the all-reduce of gradients and the update.

The schedule's time includes the communication inside the network. If ranks share cores, one rank can compute
while another waits. The prediction leaves out reading, validation, checkpoints and stragglers.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache

from ringspark.estimators.collectives.base import num_bytes
from ringspark.estimators.memory.shares import data_parallel_size, shard_group_size
from ringspark.estimators.options.mesh import AXES
from ringspark.estimators.parallel.data.gradient_all_reduce import FLAT_BYTES
from ringspark.estimators.training.settings.config import TrainConfig
from ringspark.extras.model_parallel.expert import expert_names
from ringspark.extras.model_parallel.pipeline.actions import Action, CompletedActions, PassType
from ringspark.extras.model_parallel.pipeline.orders import Orders
from ringspark.extras.planning.exchange_time import ring_seconds
from ringspark.extras.planning.meshes.cut_plan import orders_of
from ringspark.extras.planning.meshes.machine import Machine
from ringspark.extras.planning.meshes.measured_ranks import Replica
from ringspark.extras.planning.meshes.rank_step import PassBytes

# Share of the backward pass, which can hide an all-reduce.
_BACKWARD_SHARE = 2 / 3
# Fully sharded: the weights are gathered in both passes, and the gradients are reduced.
_WEIGHTS_AND_GRADIENTS = 1.5


@dataclass(frozen=True, kw_only=True)
class StepTime:
    """Predicted time of a step.

    Attributes:
        total: Seconds of the whole step.
        exposed: Seconds in which ranks only communicate.
        bubble: Share of the passes' time that the pipeline's ranks spend waiting.
    """

    total: float
    exposed: float
    bubble: float


def predict_step_time(config: TrainConfig, replica: Replica, machine: Machine) -> StepTime:
    """Predicts the time of a step; `config` has the mesh and the number of micro-batches.

    `replica` is measured with the rows of the largest micro-batch.
    """
    workers, sizes = config.num_workers, config.axes
    crowding = machine.crowding(workers)
    orders = orders_of(config, config.gradient_accumulation)
    ranks = {stage: rank for rank in replica.ranks for stage in rank.arriving}

    def measured(action: Action) -> PassBytes:
        return ranks[action.stage].passes[action.stage, action.kind is PassType.FORWARD]

    def compute(action: Action) -> float:
        whole = machine.rates.seconds(measured(action).work)
        return whole / 2 if action.kind in (PassType.INPUT, PassType.WEIGHT) else whole

    def communicate(action: Action) -> float:
        if action.kind is PassType.WEIGHT:
            return 0.0
        seconds = 0.0
        for axis, found in measured(action).messages.items():
            # Ranks along the last axis are neighbours; earlier axes have larger strides.
            reach = math.prod(sizes[other] for other in AXES[AXES.index(axis) :])
            seconds += machine.exchange(found, sizes[axis], reach)
        # A send or receive to or from the previous stage.
        if arriving := ranks[action.stage].arriving[action.stage]:
            seconds += machine.sending(arriving, workers)
        return seconds

    # Cores of one replica's pipeline ranks.
    slots = len(orders) / crowding
    alone, _ = _simulate(orders, len(ranks), slots, compute)
    # Communication was measured with all ranks of the host.
    passes, used = _simulate(
        orders, len(ranks), slots, lambda action: compute(action) + communicate(action) / crowding
    )
    gradients = _gradient_bytes(replica)
    reduce = _all_reduce_seconds(config, gradients, machine)
    # Gradients of a large network are all-reduced in buckets, during the backward pass.
    in_buckets = max(gradients)[0] > FLAT_BYTES
    if not replica.network.is_pipeline and machine.hosts(workers) > 1 and in_buckets:
        reduce -= min(reduce, _BACKWARD_SHARE * alone / config.gradient_accumulation)
    update = _update_seconds(config, replica, machine)
    return StepTime(
        total=passes + reduce + update,
        exposed=passes - alone + reduce,
        bubble=max(0.0, 1 - used) if replica.network.is_pipeline else 0.0,
    )


def _simulate(
    orders: Orders, num_stages: int, slots: float, cost: Callable[[Action], float]
) -> tuple[float, float]:
    """Returns a schedule's time in seconds on `slots` cores, and the used share of the cores' time."""

    @cache  # all micro-batches cost the same
    def cost_of(kind: PassType, stage: int) -> float:
        return cost(Action(kind, stage, 0))

    def cached_cost(action: Action) -> float:
        return cost_of(action.kind, action.stage)

    end = simulate_makespan(orders, num_stages, cached_cost, slots)
    work = sum(cached_cost(action) for order in orders for action in order)
    return end, work / (min(slots, len(orders)) * end)


def simulate_makespan(
    orders: Orders, num_stages: int, cost: Callable[[Action], float], slots: float
) -> float:
    """Returns the time at which a schedule's last action ends, if its ranks share cores.

    The time has the unit of the costs. All running actions share the cores equally. Up to `slots` actions run
    at full speed together. If `slots` is below 1, even a single action runs more slowly.
    """
    progress = CompletedActions(num_stages)
    next_of = [0] * len(orders)
    running: dict[int, float] = {}
    now = 0.0
    while True:
        for rank, order in enumerate(orders):
            if rank not in running and next_of[rank] < len(order) and progress.is_ready(order[next_of[rank]]):
                running[rank] = cost(order[next_of[rank]])
        if not running:
            assert all(at == len(order) for at, order in zip(next_of, orders, strict=True))
            return now
        speed = min(1.0, slots / len(running))
        passed = min(running.values())
        now += passed / speed
        for rank in list(running):
            running[rank] -= passed
            # A tolerance, so that simultaneous actions end together.
            if running[rank] <= 1e-12 * passed:
                del running[rank]
                progress.add(orders[rank][next_of[rank]])
                next_of[rank] += 1


def _all_reduce_seconds(config: TrainConfig, gradients: list[tuple[int, int]], machine: Machine) -> float:
    """Returns the seconds of the slowest rank's all-reduce; `gradients` comes from `_gradient_bytes`."""
    size = data_parallel_size(config)
    if size == 1:
        return 0.0
    axes = config.axes
    link = machine.link(size, axes["tensor"] * size)

    def of_rank(count: int, of_experts: int) -> float:
        # Expert gradients are reduced among ranks with the same experts only.
        seconds = ring_seconds(size, count - of_experts, link)
        if of_experts:
            seconds += ring_seconds(size // axes["expert"], of_experts, link)
        if config.sync.sharding == "parameters":
            seconds *= _WEIGHTS_AND_GRADIENTS * config.gradient_accumulation
        # The copy into the buffer reads and writes each byte.
        return seconds + 2 * count * machine.rates.byte * machine.crowding(config.num_workers)

    return max(of_rank(*found) for found in gradients)


def _update_seconds(config: TrainConfig, replica: Replica, machine: Machine) -> float:
    share = 1.0 if config.sync.sharding == "none" else 1.0 / shard_group_size(config)
    seconds = [machine.rates.seconds(rank.update_work) * share for rank in replica.ranks]
    crowding = machine.crowding(config.num_workers)
    return max(max(seconds), crowding * math.fsum(seconds) / len(seconds))


def _gradient_bytes(replica: Replica) -> list[tuple[int, int]]:
    """Returns, for each rank, the bytes of all its gradients and of its experts' gradients."""
    found = []
    for rank in replica.ranks:
        trained = {name: p for name, p in rank.module.named_parameters() if p.requires_grad}
        experts = expert_names(rank.module) & trained.keys()
        found.append((num_bytes(trained.values()), num_bytes(trained[name] for name in experts)))
    return found
