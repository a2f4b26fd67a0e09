"""The schedules by name: which stages a rank has, and in which order it works."""

from __future__ import annotations

import difflib
from collections.abc import Callable
from dataclasses import dataclass

from ringspark.estimators.parallel.model.pipeline import orders
from ringspark.estimators.parallel.model.pipeline.orders import Orders


@dataclass(frozen=True, kw_only=True)
class Schedule:
    """One way to work through a step.

    Attributes:
        order: (ranks, stages per rank, micro-batches) -> actions of each position in the pipeline; None for
            a schedule without a flush.
        passes: Import path of the subclass of `PipelinePasses` that runs it; None for `PipelinePasses`.
        virtual: The least and the most stages a rank.
        splits: Whether a backward pass is made in two halves.
        is_v: Whether the stages go down the ranks and up again, instead of round and round.
    """

    order: Callable[[int, int, int], Orders] | None = None
    passes: str | None = None
    virtual: tuple[int, int] = (1, 1)
    splits: bool = False
    is_v: bool = False

    @property
    def is_delayed(self) -> bool:
        """Whether the optimizer applies the gradients of earlier steps, because there is no flush."""
        return self.order is None

    def owners(self, num_ranks: int, virtual: int) -> list[int]:
        """Returns the rank of each stage. Rank 0 has the last one, where the losses are known."""
        down = list(range(num_ranks - 1, -1, -1))
        if self.is_v:
            return [*reversed(down), *down]
        return down * virtual

    def orders_by_rank(self, num_ranks: int, virtual: int, num_micro: int) -> Orders:
        """Returns the actions of each rank in one step of a schedule with a flush."""
        assert self.order is not None
        by_place = self.order(num_ranks, virtual, num_micro)
        return by_place if self.is_v else by_place[::-1]


_MANY = 1 << 10

SCHEDULES: dict[str, Schedule] = {
    "naive": Schedule(order=orders.naive),
    "gpipe": Schedule(order=orders.gpipe),
    "1f1b": Schedule(order=orders.one_forward_one_backward),
    "interleaved": Schedule(order=orders.interleaved, virtual=(2, _MANY)),
    "zero_bubble": Schedule(order=orders.zero_bubble, virtual=(1, _MANY), splits=True),
    "zbv": Schedule(order=orders.zbv, virtual=(2, 2), splits=True, is_v=True),
    "pipedream": Schedule(passes="ringspark.extras.schedules.delayed_passes:PipeDream"),
    "2bw": Schedule(passes="ringspark.extras.schedules.delayed_passes:DoubleBuffered"),
}


def schedule_of(name: str, virtual: int) -> Schedule:
    """Returns the schedule of a name.

    Raises:
        ValueError: It is unknown, or cannot have so many stages a rank.
    """
    if name not in SCHEDULES:
        near = difflib.get_close_matches(name, SCHEDULES, n=1)
        hint = f"did you mean {near[0]!r}? Known" if near else "known"
        raise ValueError(f"unknown pipeline schedule {name!r}; {hint} are {', '.join(SCHEDULES)}")
    least, most = SCHEDULES[name].virtual
    if not least <= virtual <= most:
        allowed = (
            f"{least} or more" if most == _MANY else str(least) if least == most else f"{least} to {most}"
        )
        raise ValueError(
            f"pipeline schedule {name!r} takes {allowed} stages a worker, got {virtual}; set virtual to "
            "that, or take another schedule: 'interleaved' is for several, '1f1b' for one"
        )
    return SCHEDULES[name]
