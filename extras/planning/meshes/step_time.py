"""Predicts the time of a step on a mesh: the schedule, the all-reduce of gradients and the update.

The schedule's time includes the communication inside the network. If ranks share cores, one rank can compute
while another waits. The prediction leaves out reading, validation, checkpoints and stragglers.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace

from ringspark.estimators.collectives.base import num_bytes
from ringspark.estimators.memory.shares import data_parallel_size, shard_group_size
from ringspark.estimators.options.mesh import AXES
from ringspark.estimators.parallel.data.gradient_all_reduce import FLAT_BYTES
from ringspark.estimators.training.settings.config import TrainConfig
from ringspark.extras.model_parallel.expert import expert_names
from ringspark.extras.model_parallel.pipeline.actions import Action, CompletedActions, PassType
from ringspark.extras.model_parallel.pipeline.orders import Orders
from ringspark.extras.planning.exchange_time import ring_seconds
from ringspark.extras.planning.memory.measured_ranks import Replica, orders_of
from ringspark.extras.planning.memory.rank_step import PassBytes, RankBytes
from ringspark.extras.planning.meshes.machine import Machine
from ringspark.extras.planning.meshes.report import MeshPlan

# Share of the backward pass, which can hide an all-reduce.
_BACKWARD_SHARE = 2 / 3
# Fully sharded: the weights are gathered in both passes, and the gradients are reduced.
_WEIGHTS_AND_GRADIENTS = 1.5


def predict_step_time(mesh: MeshPlan, config: TrainConfig, replica: Replica, machine: Machine) -> MeshPlan:
    """Returns `mesh` with the time of a step; `config` has the mesh and the number of micro-batches.

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
    reduce, is_pipeline = _all_reduce_seconds(config, replica, machine), replica.network.is_pipeline
    # Gradients of a large network are all-reduced in buckets, during the backward pass.
    in_buckets = max(rank.parts["gradients"] for rank in replica.ranks) > FLAT_BYTES
    if not is_pipeline and machine.hosts(workers) > 1 and in_buckets:
        reduce -= min(reduce, _BACKWARD_SHARE * alone / config.gradient_accumulation)
    return replace(
        mesh,
        step_seconds=passes + reduce + _update_seconds(config, replica, machine),
        exposed_seconds=passes - alone + reduce,
        bubble=max(0.0, 1 - used) if is_pipeline else 0.0,
    )


def _simulate(
    orders: Orders, num_stages: int, slots: float, cost: Callable[[Action], float]
) -> tuple[float, float]:
    """Returns a schedule's time in seconds on `slots` cores, and the used share of the cores' time."""
    end = simulate_makespan(orders, num_stages, cost, slots)
    work = sum(cost(action) for order in orders for action in order)
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


def _all_reduce_seconds(config: TrainConfig, replica: Replica, machine: Machine) -> float:
    """Returns the seconds of the slowest rank's all-reduce of gradients."""
    size, axes = data_parallel_size(config), config.axes
    if size == 1:
        return 0.0
    link = machine.link(size, axes["tensor"] * size)

    def of_rank(rank: RankBytes) -> float:
        count, experts = rank.parts["gradients"], expert_names(rank.module)
        trained = {name: p for name, p in rank.module.named_parameters() if p.requires_grad}
        # Expert gradients are reduced among ranks with the same experts only.
        of_experts = num_bytes(trained[name] for name in experts & trained.keys())
        seconds = ring_seconds(size, count - of_experts, link)
        if of_experts:
            seconds += ring_seconds(size // axes["expert"], of_experts, link)
        if config.sync.sharding == "parameters":
            seconds *= _WEIGHTS_AND_GRADIENTS * config.gradient_accumulation
        # The copy into the buffer reads and writes each byte.
        return seconds + 2 * count * machine.rates.byte * machine.crowding(config.num_workers)

    return max(map(of_rank, replica.ranks))


def _update_seconds(config: TrainConfig, replica: Replica, machine: Machine) -> float:
    share = 1.0 if config.sync.sharding == "none" else 1.0 / shard_group_size(config)
    seconds = [machine.rates.seconds(rank.update_work) * share for rank in replica.ranks]
    crowding = machine.crowding(config.num_workers)
    return max(max(seconds), crowding * math.fsum(seconds) / len(seconds))
