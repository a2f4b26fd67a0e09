"""Plans the memory of a step on each rank of a sharded network; the rank that needs most counts."""

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
from ringspark.extras.planning.meshes.schedule_peak import alternate_passes, peak_of_steps


@dataclass(frozen=True, kw_only=True)
class CutPlan:
    """Peak memory and measurements of the rank that needs most."""

    peak: Peak
    rank: RankBytes


def plan_cut(
    config: TrainConfig,
    objects: UserObjects,
    empty: nn.Module,
    inputs: Sequence[BatchColumn],
    labels: Sequence[BatchColumn],
) -> CutPlan:
    """Plans the memory of a step on the rank that needs most.

    Args:
        config: Config with resolved losses, and a `parallelism` that shards the network.
        empty: The network on `meta`; not changed.
        inputs: Arguments of `forward`, for all rows of one replica in a step.
        labels: Labels of these rows.

    Raises:
        Exception: Like `measure_step`; ValueError if the network cannot be sharded that way.
    """
    if config.axes["expert"] > 1 and config.sync.sharding != "none":
        raise ValueError(
            f"the memory of a mesh over 'expert' with sharding={config.sync.sharding!r} cannot be planned; "
            "plan it with sharding='none', which needs more"
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
    """Returns the column of the largest micro-batch."""
    return BatchColumn(shape=(-(-column.shape[0] // num_micro), *column.shape[1:]), dtype=column.dtype)


def steps_of(config: TrainConfig, owners: Sequence[int], num_micro: int) -> list[Steps]:
    """Returns the actions of each rank of a pipeline in a step, with the arrivals of values.

    Args:
        owners: Rank of each stage.

    Raises:
        ValueError: Like `orders_of`.
    """
    orders = orders_of(config, num_micro)
    return [alternate_passes(num_micro)] if len(owners) == 1 else with_arrivals(orders, owners)


def orders_of(config: TrainConfig, num_micro: int) -> Orders:
    """Returns the actions of each rank of a pipeline in a step.

    Raises:
        ValueError: The schedule has no flush, so its steps overlap.
    """
    num_ranks, way = config.axes["pipeline"], config.parallelism.pipeline
    if num_ranks == 1:
        return [[step for step in alternate_passes(num_micro) if isinstance(step, Action)]]
    schedule = schedule_of(way.schedule, way.virtual)
    if schedule.order is None:
        raise ValueError(
            f"the memory of pipeline schedule {way.schedule!r}, whose steps overlap, cannot be planned; plan "
            "it as '1f1b', and add a copy of the stage's weights for each step of delay"
        )
    return schedule.orders_by_rank(num_ranks, way.virtual, num_micro)
