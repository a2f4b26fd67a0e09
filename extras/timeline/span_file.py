"""The file of one rank's spans: `timeline/rank-<k>-<start>.json` in the folder of the run.

All times are nanoseconds by the rank's own clock. The file also says how far that clock was from rank 0's,
with a bound of the error, so that whoever reads the files of all ranks puts them on one axis.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import asdict, dataclass

from ringspark.estimators import run_layout
from ringspark.extras.timeline.clocks import ClockOffset, SharedMoment, offset_at
from ringspark.pipelines import storage
from ringspark.pipelines.typed_json import added, record, versioned

FORMAT_VERSION = 1

Span = tuple[str, int, int]
"""Kind, begin and end of a span."""

OperationSpan = tuple[str, int, int, int]
"""Name of an operation over the collective; when its data was ready, it began, its result was there."""


@dataclass(frozen=True, kw_only=True)
class StepSpans:
    """One step of one rank.

    Attributes:
        epoch: Number of the epoch, from 1.
        step: Number of the step in the training, from 1.
        rows: This rank's rows of the step.
        begin_ns: Time at which the rank asked for the step's batch.
        end_ns: Time at which it was ready to ask for the next one.
        spans: Times at which the host began and ended something.
        device_spans: The same by the GPU's events; empty on a CPU, or if they had not ended yet.
        operations: Operations over the collective, in the order in which they began; none in a file of
            before they were recorded.
    """

    epoch: int
    step: int
    rows: int
    begin_ns: int
    end_ns: int
    spans: tuple[Span, ...]
    device_spans: tuple[Span, ...] = ()
    operations: tuple[OperationSpan, ...] = added(())


@dataclass(frozen=True, kw_only=True)
class RareSpan:
    """A checkpoint or a validation, after `step` of the training; all are recorded, not every n-th."""

    kind: str
    epoch: int
    step: int
    begin_ns: int
    end_ns: int


@dataclass(frozen=True, kw_only=True)
class RankSpans:
    """What one rank recorded between one start of the gang and its end.

    Attributes:
        moment: A moment by the clocks of rank 0; equal on all ranks of one start.
        every: Distance of the steps in `steps`.
        taken_steps: Steps that the rank took, recorded or not.
        offsets: How far the rank's clock was ahead of rank 0's, in order of time.
        left_out: Spans that were not recorded, because a step had too many.
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
        """When the gang started, in milliseconds since 1970: equal on all its ranks, later at a restart."""
        return start_of(self.moment)

    def unix_ns(self, at_ns: int) -> int:
        """Returns a time of the rank's clock on the axis of all ranks: nanoseconds since 1970, by rank 0."""
        by_rank_0 = at_ns - offset_at(self.offsets, at_ns)
        return by_rank_0 - self.moment.clock_ns + self.moment.unix_ns

    def to_json(self) -> bytes:
        # `asdict` of the whole would copy every span.
        lists = {
            "moment": asdict(self.moment),
            "offsets": [asdict(offset) for offset in self.offsets],
            "steps": [vars(step) for step in self.steps],
            "rare": [vars(span) for span in self.rare],
        }
        return json.dumps(vars(self) | lists, separators=(",", ":")).encode()

    @classmethod
    def from_json(cls, data: bytes) -> RankSpans:
        """Reads the result of `to_json`.

        Raises:
            ValueError: The text is damaged or of another version.
        """
        return record(cls, versioned(data, FORMAT_VERSION))


def start_of(moment: SharedMoment) -> int:
    """Returns the number that a start of the gang goes by."""
    return moment.unix_ns // 1_000_000


def span_file_uri(run_uri: str, rank: int, start: int) -> str:
    """Returns the URI of a rank's file."""
    return storage.join(run_uri, run_layout.TIMELINE, f"rank-{rank}-{start}.json")


def read_spans(run_uri: str) -> list[RankSpans]:
    """Returns all ranks' spans of all starts, in the order of starts and ranks; empty if there are none.

    Raises:
        ValueError: A file is damaged.
    """
    folder = storage.join(storage.normalize(run_uri), run_layout.TIMELINE)
    found = [_read(storage.join(folder, name)) for name in _files(storage.list_names(folder))]
    return sorted(found, key=lambda spans: (spans.start, spans.rank))


def _files(names: Iterable[str]) -> list[str]:
    # A killed `write_atomic` leaves a temporary file, whose name begins with a dot.
    return [name for name in names if name.startswith("rank-") and name.endswith(".json")]


def _read(uri: str) -> RankSpans:
    try:
        return RankSpans.from_json(storage.read_bytes(uri))
    except ValueError as error:
        raise ValueError(f"{uri} is damaged ({error}); remove it to see what the other files hold") from None
