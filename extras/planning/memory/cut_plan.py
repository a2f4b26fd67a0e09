"""Adds up the memory of a step from the passes that a rank runs, in the order of its schedule."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from ringspark.estimators.training.settings.config import TrainConfig
from ringspark.extras.model_parallel.pipeline.actions import Arrival, PassType, Steps, with_arrivals
from ringspark.extras.model_parallel.pipeline.orders import Orders, naive
from ringspark.extras.model_parallel.pipeline.schedules import schedule_of
from ringspark.extras.model_parallel.pipeline.transfers import SENDS_IN_FLIGHT
from ringspark.extras.planning.memory.meter import Peak
from ringspark.extras.planning.memory.rank_step import RankBytes
from ringspark.extras.planning.memory.sharing import (
    communication_bytes,
    reduces_during_backward,
    reduces_in_buckets,
)
from ringspark.extras.planning.memory.step import LEAVING


def steps_of(config: TrainConfig, owners: Sequence[int], num_micro: int) -> list[Steps]:
    """Returns each rank's actions in a step and the arrivals of values from other ranks.

    Raises ValueError if the schedule has no flush.
    """
    orders = orders_of(config, num_micro)
    return [list(orders[0])] if len(owners) == 1 else with_arrivals(orders, owners)


def orders_of(config: TrainConfig, num_micro: int) -> Orders:
    """Returns each rank's actions in a step of a pipeline.

    Raises:
        ValueError: The schedule has no flush, so one step overlaps with the next.
    """
    num_ranks, way = config.axes["pipeline"], config.parallelism.pipeline
    if num_ranks == 1:
        return naive(1, 1, num_micro)
    schedule = schedule_of(way.schedule, way.virtual)
    if schedule.order is None:
        raise ValueError(
            f"the memory of pipeline schedule {way.schedule!r}, whose steps overlap, cannot be planned; plan "
            "it as '1f1b', and add a copy of the stage's weights for each step of delay"
        )
    return schedule.orders_by_rank(num_ranks, way.virtual, num_micro)


def peak_of_steps(rank: RankBytes, steps: Steps, config: TrainConfig) -> Peak:
    """Returns the peak memory of a rank's step; `config.parallelism` has all axes of the mesh.

    At any moment a rank holds the tensors that forward passes saved for later backward passes, received
    values, gradients that are not sent yet, and the temporary tensors of the running pass.
    """
    sharding = config.sync.sharding
    peaks_of = LEAVING if reduces_during_backward(config) else sharding
    # All rows of the step stay in memory until its end.
    rows = rank.step_rows or rank.batch * len({step.micro for step in steps})
    held, ended, on_their_way, sent, most = 0, 0, 0, 0, 0
    highest = Peak(parts={})
    begun: set[int] = set()
    for step in steps:
        if isinstance(step, Arrival):
            on_their_way += rank.arriving[step.stage] if step.is_forward else rank.returning[step.stage]
            continue
        kind, stage, _ = step
        found = rank.passes if stage in begun else rank.first
        one, forward_kept = found[stage, kind is PassType.FORWARD], found[stage, True].kept
        if kind in (PassType.BACKWARD, PassType.WEIGHT):
            held -= forward_kept
        # The measured pass includes its received values.
        if kind is not PassType.WEIGHT:
            on_their_way -= rank.arriving[stage] if kind is PassType.FORWARD else rank.returning[stage]
        extra = held + ended + on_their_way + min(sent, SENDS_IN_FLIGHT) * rank.arriving[stage]
        peak = one.peaks[peaks_of]
        most = max(most, peak.most_activations + extra)
        peak = peak.with_parts(activations=peak.parts["activations"] + extra, batch=rows)
        highest = max(highest, peak, key=lambda found: found.total)
        if kind is PassType.FORWARD:
            held += forward_kept
        if kind in (PassType.BACKWARD, PassType.INPUT):
            sent += rank.arriving[stage] > 0
        if kind in (PassType.BACKWARD, PassType.WEIGHT):
            ended += forward_kept + one.kept
            begun.add(stage)
    update = rank.update.peaks[sharding]
    in_passes = highest.with_parts(optimizer_state=update.parts.get("optimizer_state", 0))
    update = update.with_parts(batch=rows)
    if reduces_in_buckets(config):
        update = update.with_parts(gradients=0)
    peak = max(in_passes, update, key=lambda found: found.total)
    peak = replace(peak, most_activations=max(most, update.most_activations))
    return peak.with_parts(communication=communication_bytes(config, rank.module))
