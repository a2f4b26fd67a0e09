"""Finds by how much the clocks of the ranks differ, so that their spans share one axis of time.

A rank can only know that what it received was sent before. Let rank r's clock be ahead of rank 0's by d. In
one all-gather each rank sends the time T before its call, and notes the time R after it. Rank 0 had sent
before r received, so T_0 <= R_r - d, and r before rank 0 received, so T_r - d <= R_0:

    T_r - R_0  <=  d  <=  R_r - T_0

Each round gives such bounds, and the tightest of all rounds hold at once (Cristian 1989, "Probabilistic
Clock Synchronization"). The middle of the two is taken, and half their distance is the error's bound.
"""

from __future__ import annotations

import time
from dataclasses import dataclass

import torch

from ringspark.estimators.collectives import Collective
from ringspark.estimators.training.observation.timeline import Clock, now_ns

ROUNDS = 16


@dataclass(frozen=True, kw_only=True)
class SharedMoment:
    """One moment by both clocks of rank 0, which all ranks know.

    Attributes:
        clock_ns: Time by the clock that rank 0's spans have.
        unix_ns: Nanoseconds since 1970.
    """

    clock_ns: int
    unix_ns: int


@dataclass(frozen=True, kw_only=True)
class ClockOffset:
    """How far a rank's clock was ahead of rank 0's.

    Attributes:
        at_ns: Time of the measurement by the rank's clock.
        offset_ns: The rank's clock minus rank 0's.
        error_ns: Bound of the offset's error, to either side.
    """

    at_ns: int
    offset_ns: int
    error_ns: int


def measure_offset(
    world: Collective, clock: Clock = now_ns, rounds: int = ROUNDS
) -> tuple[ClockOffset, SharedMoment]:
    """Compares the clocks of all ranks; returns this rank's offset and a moment. Runs on every rank."""
    low, high = None, None
    sent, received = 0, 0
    for number in range(rounds + 1):
        sent_before, received_before = sent, received
        sent = clock()
        mine = torch.tensor([sent, received_before, time.time_ns()])
        first = world.all_gather(mine, [3] * world.size)[0].tolist()
        received = clock()
        if number:
            # What rank 0 noted after the round before.
            bound = sent_before - first[1]
            low = bound if low is None else max(low, bound)
        bound = received - first[0]
        high = bound if high is None else min(high, bound)
    assert low is not None
    assert high is not None
    moment = SharedMoment(clock_ns=first[0], unix_ns=first[2])
    if world.rank == 0:
        return ClockOffset(at_ns=received, offset_ns=0, error_ns=0), moment
    # Clocks that drifted between two rounds may leave the bounds the wrong way around.
    error = abs(high - low) // 2 + 1
    return ClockOffset(at_ns=received, offset_ns=(low + high) // 2, error_ns=error), moment


def offset_at(offsets: tuple[ClockOffset, ...], at_ns: int) -> int:
    """Returns the offset at a time of the rank's clock: between two measurements, clocks drift evenly."""
    before = [known for known in offsets if known.at_ns <= at_ns]
    after = [known for known in offsets if known.at_ns > at_ns]
    if not before or not after:
        return (before[-1] if before else after[0]).offset_ns
    left, right = before[-1], after[0]
    share = (at_ns - left.at_ns) / (right.at_ns - left.at_ns)
    return left.offset_ns + round(share * (right.offset_ns - left.offset_ns))
