"""Measures the clock offsets of the ranks, so that their spans share one time axis.

The ranks repeat an all-gather. In each call, every rank sends the time T at which it starts the call, and
records the time R at which the call returns. No rank receives a message before it was sent, which bounds the
offset d between rank r's clock and rank 0's clock:

    T_r - R_0  <=  d  <=  R_r - T_0

Cristian 1989, "Probabilistic Clock Synchronization".
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
    """The same moment on two clocks of rank 0: the clock of its spans, and nanoseconds since 1970."""

    clock_ns: int
    unix_ns: int


@dataclass(frozen=True, kw_only=True)
class ClockOffset:
    """Difference of a rank's clock and rank 0's clock, measured at `at_ns` on the rank's clock.

    Attributes:
        error_ns: Upper bound of the error of `offset_ns`, in either direction.
    """

    at_ns: int
    offset_ns: int
    error_ns: int


def measure_offset(
    world: Collective, clock: Clock = now_ns, rounds: int = ROUNDS
) -> tuple[ClockOffset, SharedMoment]:
    """Returns this rank's clock offset, and the `SharedMoment` of rank 0. Every rank must call it."""
    lows: list[int] = []
    highs: list[int] = []
    sent, received = 0, 0
    for number in range(rounds + 1):
        sent_before, received_before = sent, received
        sent = clock()
        mine = torch.tensor([sent, received_before, time.time_ns()])
        first = world.all_gather(mine, [3] * world.size)[0].tolist()
        received = clock()
        if number:
            # first[1] is rank 0's receive time of the previous round.
            lows.append(sent_before - first[1])
        highs.append(received - first[0])
    moment = SharedMoment(clock_ns=first[0], unix_ns=first[2])
    if world.rank == 0:
        return ClockOffset(at_ns=received, offset_ns=0, error_ns=0), moment
    low, high = max(lows), min(highs)
    # Drift between two rounds may swap the bounds.
    error = abs(high - low) // 2 + 1
    return ClockOffset(at_ns=received, offset_ns=(low + high) // 2, error_ns=error), moment


def interpolate_offset(offsets: tuple[ClockOffset, ...], at_ns: int) -> int:
    """Returns the clock offset at a time on the rank's clock, interpolated between two measurements."""
    before = [known for known in offsets if known.at_ns <= at_ns]
    after = [known for known in offsets if known.at_ns > at_ns]
    if not before or not after:
        return (before[-1] if before else after[0]).offset_ns
    left, right = before[-1], after[0]
    share = (at_ns - left.at_ns) / (right.at_ns - left.at_ns)
    return left.offset_ns + round(share * (right.offset_ns - left.offset_ns))
