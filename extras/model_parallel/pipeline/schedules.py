"""Pipeline schedules: the stages of each rank, and the order of their passes."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

from ringspark.extras.model_parallel.pipeline import delayed, orders
from ringspark.extras.model_parallel.pipeline.orders import Orders


@dataclass(frozen=True, kw_only=True)
class Schedule:
    """One schedule.

    Attributes:
        order: (ranks, stages per rank, micro-batches) -> actions of each position in the pipeline; None for
            a schedule without a flush.
        delays: (ranks, micro-batches) -> delay of each stage's gradients, in steps, for a schedule without a
            flush.
        virtual: Smallest and largest number of stages per rank.
        is_v: Whether the stages go down the ranks and up again, instead of around.
    """

    order: Callable[[int, int, int], Orders] | None = None
    delays: Callable[[int, int], list[int]] | None = None
    virtual: tuple[int, int] = (1, 1)
    is_v: bool = False

    def owners(self, num_ranks: int, virtual: int) -> list[int]:
        """Returns the rank of each stage. Rank 0 has the last stage, which computes the losses."""
        down = list(range(num_ranks - 1, -1, -1))
        if self.is_v:
            return [*reversed(down), *down]
        return down * virtual

    def orders_by_rank(self, num_ranks: int, virtual: int, num_micro: int) -> Orders:
        assert self.order is not None
        by_place = self.order(num_ranks, virtual, num_micro)
        return by_place if self.is_v else by_place[::-1]


_MANY = 1 << 10

SCHEDULES: dict[str, Schedule] = {
    "naive": Schedule(order=orders.naive),
    "gpipe": Schedule(order=orders.gpipe),
    "1f1b": Schedule(order=orders.one_forward_one_backward),
    "interleaved": Schedule(
        order=partial(orders.order_of_torch, "ScheduleInterleaved1F1B"), virtual=(2, _MANY)
    ),
    "zero_bubble": Schedule(
        order=partial(orders.order_of_torch, "ScheduleInterleavedZeroBubble"), virtual=(1, _MANY)
    ),
    "zbv": Schedule(order=partial(orders.order_of_torch, "ScheduleZBVZeroBubble"), virtual=(2, 2), is_v=True),
    "pipedream": Schedule(delays=delayed.late_by_depth),
    "2bw": Schedule(delays=delayed.one_step_late),
}


def schedule_of(name: str, virtual: int) -> Schedule:
    """Returns the schedule called `name`; refuses an unsupported number of stages per rank."""
    least, most = SCHEDULES[name].virtual
    if not least <= virtual <= most:
        allowed = (
            f"{least} or more" if most == _MANY else str(least) if least == most else f"{least} to {most}"
        )
        raise ValueError(
            f"pipeline schedule {name!r} needs {allowed} stages per worker, got virtual={virtual}; change "
            "virtual, or the schedule: 'interleaved' is for several stages, '1f1b' for one"
        )
    return SCHEDULES[name]
