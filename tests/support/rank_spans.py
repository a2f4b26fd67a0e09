"""A timeline of one step of one rank, made by hand."""

from typing import Any

from ringspark.extras.timeline.clocks import ClockOffset, SharedMoment
from ringspark.extras.timeline.span_file import RankSpans, StepSpans


def one_step(rank: int = 0, size: int = 1, **recorded: Any) -> RankSpans:
    """Returns a step from 0 to 100 ns with `spans` and `operations`."""
    step = StepSpans(epoch=1, step=1, rows=8, begin_ns=0, end_ns=100, **{"spans": (), **recorded})
    moment, offset = SharedMoment(clock_ns=0, unix_ns=0), ClockOffset(at_ns=0, offset_ns=0, error_ns=0)
    counts = {"every": 1, "taken_steps": 1, "left_out": 0}
    place = {"rank": rank, "size": size, "host": "here", "moment": moment, "offsets": (offset,)}
    return RankSpans(steps=(step,), rare=(), **counts, **place)
