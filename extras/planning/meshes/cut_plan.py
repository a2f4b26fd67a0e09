"""The memory of a step on each rank of a network that a mesh cuts; the fullest tells what a worker needs."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from torch import nn

from ringspark.estimators.memory.columns import BatchColumn
from ringspark.estimators.memory.meter import Peak
from ringspark.estimators.parallel.model.pipeline.actions import Action, Steps, with_arrivals
from ringspark.estimators.parallel.model.pipeline.orders import Orders
from ringspark.estimators.parallel.model.pipeline.schedules import schedule_of
from ringspark.estimators.training.settings.config import TrainConfig, UserObjects
from ringspark.extras.planning.meshes.cut_network import cut_network
from ringspark.extras.planning.meshes.rank_step import RankBytes, measure_ranks
from ringspark.extras.planning.meshes.schedule_peak import in_turns, peak_of_steps


@dataclass(frozen=True, kw_only=True)
class CutPlan:
    """The rank of one copy that needs the most.

    Attributes:
        peak: Its moment with the most bytes.
        rank: What was measured of it.
    """

    peak: Peak
    rank: RankBytes


def plan_cut(
    config: TrainConfig,
    objects: UserObjects,
    empty: nn.Module,
    inputs: Sequence[BatchColumn],
    labels: Sequence[BatchColumn],
) -> CutPlan:
    """Plans the bytes of a step on the rank that needs the most.

    Args:
        config: Config with resolved losses, and a `parallelism` that cuts the network.
        empty: The network without weights; not changed.
        inputs: Arguments of `forward`, of all rows that one copy of the network has in a step.
        labels: Labels of these rows.

    Raises:
        Exception: Like `measure_step`; ValueError if the network cannot be cut that way.
    """
    if config.axes["expert"] > 1 and config.sync.sharding != "none":
        raise ValueError(
            f"the memory of a mesh over 'expert' with sharding={config.sync.sharding!r} is not "
            "planned; plan it with sharding='none', which needs more"
        )
    num_micro = min(config.gradient_accumulation, labels[0].shape[0])
    inputs, labels = ([micro_batch(c, num_micro) for c in columns] for columns in (inputs, labels))
    network = cut_network(empty, config.axes, config.parallelism, inputs)
    ranks = measure_ranks(config, objects, network, inputs, labels)
    plans = [
        CutPlan(peak=peak_of_steps(rank, steps, config.sync.sharding), rank=rank)
        for rank, steps in zip(ranks, steps_of(config, network.owners, num_micro), strict=True)
    ]
    return max(plans, key=lambda plan: plan.peak.total)


def micro_batch(column: BatchColumn, num_micro: int) -> BatchColumn:
    """Returns the largest of the equal parts of a column."""
    return BatchColumn(shape=(-(-column.shape[0] // num_micro), *column.shape[1:]), dtype=column.dtype)


def steps_of(config: TrainConfig, owners: Sequence[int], num_micro: int) -> list[Steps]:
    """Returns what each rank of a pipeline does in a step, and when it begins to receive.

    Args:
        owners: Rank of each stage.

    Raises:
        ValueError: Like `orders_of`.
    """
    orders = orders_of(config, num_micro)
    return [in_turns(num_micro)] if len(owners) == 1 else with_arrivals(orders, owners)


def orders_of(config: TrainConfig, num_micro: int) -> Orders:
    """Returns what each rank of a pipeline does in a step.

    Raises:
        ValueError: The schedule is one without a flush, whose steps reach into each other.
    """
    num_ranks, way = config.axes["pipeline"], config.parallelism.pipeline
    if num_ranks == 1:
        return [[step for step in in_turns(num_micro) if isinstance(step, Action)]]
    schedule = schedule_of(way.schedule, way.virtual)
    if schedule.order is None:
        raise ValueError(
            f"the memory of pipeline schedule {way.schedule!r}, whose steps reach into each other, is "
            "not planned; plan it as '1f1b', and add a copy of the stage's weights for each step it is late"
        )
    return schedule.orders_by_rank(num_ranks, way.virtual, num_micro)
