"""Peak memory of a rank's step, from the measured passes and the order of a schedule.

At any moment memory holds the saved tensors of micro-batches between their two passes, received values,
unsent gradients, and the temporaries of the running pass.
"""

from __future__ import annotations

from ringspark.estimators.memory.meter import Peak
from ringspark.estimators.parallel.model.pipeline.actions import Action, Arrival, PassType, Steps
from ringspark.estimators.parallel.model.pipeline.transfers import SENDS_IN_FLIGHT
from ringspark.extras.planning.meshes.rank_step import LEAVING, RankBytes


def peak_of_steps(rank: RankBytes, steps: Steps, sharding: str) -> Peak:
    """Returns the peak of a rank's step.

    Args:
        steps: Actions and arrivals of the rank.
    """
    micros = {step.micro for step in steps}
    # All rows of the step stay in memory until its end.
    waiting = rank.batch * (len(micros) - 1)
    held, ended, on_their_way, sent = 0, 0, 0, 0
    highest = Peak(total=0, parts={})
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
        highest = _higher(highest, one.peaks[LEAVING if rank.leaves else sharding], extra, waiting)
        if kind is PassType.FORWARD:
            held += forward_kept
        if kind in (PassType.BACKWARD, PassType.INPUT):
            sent += rank.arriving[stage] > 0
        if kind in (PassType.BACKWARD, PassType.WEIGHT):
            ended += forward_kept + one.kept
            begun.add(stage)
    state = rank.update.peaks[sharding].parts.get("optimizer_state", 0)
    in_passes = highest.with_parts(optimizer_state=state)
    update = rank.update.peaks[sharding]
    update = update.with_parts(batch=update.parts["batch"] + waiting)
    if rank.in_buckets:
        update = update.with_parts(gradients=0)
    peak = max(in_passes, update, key=lambda found: found.total)
    return peak.with_parts(communication=rank.communication)


def alternate_passes(num_micro: int) -> Steps:
    """Returns the actions of a rank without a pipeline: each micro-batch forward and backward."""
    return [
        Action(kind, 0, micro) for micro in range(num_micro) for kind in (PassType.FORWARD, PassType.BACKWARD)
    ]


def _higher(highest: Peak, own: Peak, extra: int, waiting: int) -> Peak:
    if own.total + extra + waiting <= highest.total:
        return highest
    parts = own.parts
    return own.with_parts(activations=parts["activations"] + extra, batch=parts["batch"] + waiting)
