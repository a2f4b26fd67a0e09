"""File of one rank's spans in the run folder: `timeline/rank-<k>-<start>.json`; see `RankSpans.start`.

All times are nanoseconds on the rank's own clock. The file also holds the offset to the clock of rank 0.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, field

from ringspark.estimators import run_layout
from ringspark.extras.timeline.clocks import ClockOffset, SharedMoment, interpolate_offset
from ringspark.pipelines import storage
from ringspark.pipelines.typed_json import record, versioned

FORMAT_VERSION = 1

Span = tuple[str, int, int]
"""Kind, begin and end of a span."""

OperationSpan = tuple[str, int, int, int]
"""Name of a collective operation, and the times when its data was ready, when it began and when it ended."""


@dataclass(kw_only=True)
class StepSpans:
    """One step of one rank; `RankTimeline` fills it during the step.

    Attributes:
        epoch, step: Numbers of the epoch and the step, counted from 1.
        rows: Number of rows that this rank had in the step.
        begin_ns: Time at which the trainer requested the step's batch.
        spans: Spans on the host's clock.
        device_spans: Spans timed by the GPU; empty on a CPU, or if the GPU had not finished them.
        operations: Collective operations, ordered by their start.
    """

    epoch: int
    step: int
    rows: int = 0
    begin_ns: int
    end_ns: int = 0
    spans: list[Span] = field(default_factory=list)
    device_spans: list[Span] = field(default_factory=list)
    operations: list[OperationSpan] = field(default_factory=list)


@dataclass(frozen=True, kw_only=True)
class RareSpan:
    """A checkpoint or a validation after `step`. A file holds the newest `MOST_RARE_SPANS` of them."""

    kind: str
    epoch: int
    step: int
    begin_ns: int
    end_ns: int


@dataclass(frozen=True, kw_only=True)
class RankSpans:
    """Spans of one rank, from one launch of the training to its end.

    Attributes:
        every: Recording interval in steps.
        taken_steps: Number of steps that the rank has taken, recorded or not.
        left_out: Number of spans that were not recorded, because a step had too many.
        moment: One moment of the launch, on rank 0's span clock and since 1970; equal on all ranks.
        offsets: Measured clock offsets, ordered by time.
    """

    rank: int
    size: int
    host: str
    every: int
    taken_steps: int
    left_out: int
    moment: SharedMoment
    offsets: tuple[ClockOffset, ...]
    steps: tuple[StepSpans, ...]
    rare: tuple[RareSpan, ...]
    format_version: int = FORMAT_VERSION

    @property
    def start(self) -> int:
        """Time of the training's launch, in milliseconds since 1970; the same on all ranks."""
        return start_number(self.moment)

    def unix_ns(self, at_ns: int) -> int:
        """Converts a time on the rank's clock to nanoseconds since 1970 on rank 0's clock."""
        by_rank_0 = at_ns - interpolate_offset(self.offsets, at_ns)
        return by_rank_0 - self.moment.clock_ns + self.moment.unix_ns

    def to_json(self) -> bytes:
        # `asdict` would copy every span.
        return json.dumps(vars(self), default=vars, separators=(",", ":")).encode()

    @classmethod
    def from_json(cls, data: bytes) -> RankSpans:
        """Reads the result of `to_json`. Raises ValueError if it is damaged or has another format version."""
        return record(cls, versioned(data, FORMAT_VERSION))


def start_number(moment: SharedMoment) -> int:
    return moment.unix_ns // 1_000_000


def span_file_uri(run_uri: str, rank: int, start: int) -> str:
    return storage.join(run_uri, run_layout.TIMELINE, f"rank-{rank}-{start}.json")


def read_spans(run_uri: str) -> list[RankSpans]:
    """Returns the spans of all launches and ranks, ordered by launch, then rank.

    Raises ValueError if the run has no timeline or a file is damaged.
    """
    folder = storage.join(storage.normalize(run_uri), run_layout.TIMELINE)
    # A killed `write_atomic` leaves a temporary file, whose name begins with a dot.
    names = [n for n in storage.list_names(folder) if n.startswith("rank-") and n.endswith(".json")]
    found = []
    for uri in (storage.join(folder, name) for name in names):
        try:
            found.append(RankSpans.from_json(storage.read_bytes(uri)))
        except ValueError as error:
            raise ValueError(f"{uri} is damaged ({error}); remove it to use the other files") from None
    if not found:
        raise ValueError(
            f"the run in {run_uri!r} has no timeline; set timelineEverySteps and a permanent runUri"
        )
    return sorted(found, key=lambda spans: (spans.start, spans.rank))
