"""Puts the spans of all ranks of a run on one time axis, and computes how ranks spend their time.

An `exchange` is a span in which a rank waits for reduced gradients. The time until the last rank begins its
`exchange` is a `wait` slice, even if other ranks already communicate. A `wait` is left out if it is shorter
than the sum of the clock errors of the rank and the last rank.
"""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

from ringspark.extras.timeline.span_file import RankSpans, StepSpans, read_spans
from ringspark.pipelines import storage

OTHER = "other"
"""Kind for the rest of a step: the training loop itself, sums for the epoch's metrics, and callbacks."""

_Key = tuple[int, int, int]  # start of the gang, number of the step, number of earlier runs of the step
_Arrivals = dict[_Key, list[tuple[int, int]]]


@dataclass(frozen=True, kw_only=True)
class TraceSlice:
    """One span of one rank on the common time axis.

    Attributes:
        kind: A `StepKind` or `RareKind`, `wait`, a collective operation, or `step <n>` for a whole step.
        begin_ns, end_ns: Nanoseconds since 1970 on the clock of rank 0.
        is_whole: Whether the slice is a whole recorded step, which encloses the slices of its parts.
        is_on_device: Whether the GPU measured the slice's times.
        lane: Number of the trace's thread for a collective operation, from 1; 0 for the rank's own work.
        ready_ns: Time when the data of a collective operation was ready.
    """

    kind: str
    host: str
    rank: int
    start: int
    begin_ns: int
    end_ns: int
    epoch: int
    step: int
    rows: int | None = None
    is_whole: bool = False
    is_on_device: bool = False
    lane: int = 0
    ready_ns: int | None = None


def make_slices(ranks: Sequence[RankSpans]) -> list[TraceSlice]:
    """Returns all slices, ordered by rank and time. A `wait` slice lies inside an `exchange` slice."""
    arrivals = _last_arrivals(ranks)
    found = [piece for spans in ranks for piece in _slice_rank(spans, arrivals)]
    return sorted(found, key=lambda piece: (piece.rank, piece.begin_ns, -piece.end_ns))


def chrome_trace(run_uri: str) -> dict[str, Any]:
    """Returns a run's trace in the JSON format of Perfetto (ui.perfetto.dev) and chrome://tracing.

    The trace has a process per host and a thread per rank; collective operations have threads of their own.
    `start` in a slice's arguments is the number of the training's launch.

    Raises:
        ValueError: The run has no timeline, or a file is damaged.
    """
    ranks = read_spans(run_uri)
    pieces = make_slices(ranks)
    hosts = sorted({spans.host for spans in ranks})
    starts = sorted({spans.start for spans in ranks})
    zero = min((piece.begin_ns for piece in pieces), default=0)
    events: list[dict[str, Any]] = [
        {"ph": "M", "name": "process_name", "pid": number, "args": {"name": host}}
        for number, host in enumerate(hosts)
    ]
    threads: dict[tuple[int, int], str] = {}
    width = 2 + max((piece.lane for piece in pieces), default=0)
    for piece in pieces:
        thread, category = int(piece.is_on_device), piece.kind
        suffix = ", device" if piece.is_on_device else ""
        if piece.lane:
            thread, category = 1 + piece.lane, "communication"
            suffix = ", communication" + (f" {piece.lane}" if piece.lane > 1 else "")
        pid, tid = hosts.index(piece.host), width * piece.rank + thread
        threads[pid, tid] = f"rank {piece.rank}{suffix}"
        start = starts.index(piece.start) + 1
        args: dict[str, float] = {"epoch": piece.epoch, "step": piece.step, "start": start}
        if piece.rows is not None:
            args["rows"] = piece.rows
        if piece.ready_ns is not None:
            args["ready_ms_before"] = (piece.begin_ns - piece.ready_ns) / 1e6
        events.append(
            {
                "ph": "X",
                "name": piece.kind,
                "cat": "whole step" if piece.is_whole else category,
                "pid": pid,
                "tid": tid,
                "ts": (piece.begin_ns - zero) / 1000,
                "dur": (piece.end_ns - piece.begin_ns) / 1000,
                "args": args,
            }
        )
    for (pid, tid), name in sorted(threads.items()):
        thread_of = {"ph": "M", "pid": pid, "tid": tid}
        events.append(thread_of | {"name": "thread_name", "args": {"name": name}})
        events.append(thread_of | {"name": "thread_sort_index", "args": {"sort_index": tid}})
    clocks = [
        {
            "rank": spans.rank,
            "start": spans.start,
            "offset_microseconds": spans.offsets[0].offset_ns / 1000,
            "error_microseconds": _clock_error(spans) / 1000,
        }
        for spans in ranks
    ]
    return {"traceEvents": events, "displayTimeUnit": "ms", "otherData": {"run": run_uri, "clocks": clocks}}


def write_trace(run_uri: str, path: str) -> str:
    """Writes a run's trace to a file on any store; returns the path. Raises the errors of `chrome_trace`."""
    storage.write_atomic(storage.normalize(path), json.dumps(chrome_trace(run_uri)).encode())
    return path


def time_shares(run_uri: str) -> dict[int, dict[str, float]]:
    """Returns each rank's share of the training's time per kind of span, estimated from the recorded steps.

    A rank's shares sum to 1, with "other" for the rest of the steps. Device times of a step replace its host
    times. Raises the errors of `chrome_trace`.
    """
    ranks = read_spans(run_uri)
    arrivals = _last_arrivals(ranks)
    seconds: dict[int, defaultdict[str, float]] = {}
    for spans in ranks:
        own = seconds.setdefault(spans.rank, defaultdict(float))
        for kind, value in _sum_seconds(spans, arrivals).items():
            own[kind] += value
    return {
        rank: {kind: value / (sum(own.values()) or 1.0) for kind, value in own.items()}
        for rank, own in seconds.items()
    }


def _sum_seconds(spans: RankSpans, arrivals: _Arrivals) -> dict[str, float]:
    in_steps: defaultdict[str, float] = defaultdict(float)
    between: defaultdict[str, float] = defaultdict(float)
    timed = {step.step for step in spans.steps if step.device_spans}
    for piece in _slice_rank(spans, arrivals):
        if piece.lane:
            continue  # parallel to the rank's own work
        length = (piece.end_ns - piece.begin_ns) / 1e9
        if piece.is_whole:
            in_steps[OTHER] += length
        elif piece.rows is None:
            between[piece.kind] += length
        elif piece.is_on_device or piece.kind == "read" or piece.step not in timed:
            in_steps[piece.kind] += length
            # A wait is part of its exchange, which is subtracted from the step already.
            in_steps["exchange" if piece.kind == "wait" else OTHER] -= length
    # Checkpoints inside recorded steps do not count as the rest of the step.
    windows = {step.step: step for step in spans.steps}
    for rare in spans.rare:
        step = windows.get(rare.step)
        if step is not None and step.begin_ns <= rare.begin_ns < step.end_ns:
            in_steps[OTHER] -= (rare.end_ns - rare.begin_ns) / 1e9
    scale = spans.taken_steps / len(spans.steps) if spans.steps else 0.0
    return {kind: max(0.0, value) * scale for kind, value in in_steps.items()} | between


def _clock_error(spans: RankSpans) -> int:
    return max(offset.error_ns for offset in spans.offsets)


def _slice_rank(spans: RankSpans, arrivals: _Arrivals) -> Iterator[TraceSlice]:
    common: dict[str, Any] = {"host": spans.host, "rank": spans.rank, "start": spans.start}
    for key, step in _key_steps(spans):
        of_step = common | {"epoch": step.epoch, "step": step.step, "rows": step.rows}
        begin, end = spans.unix_ns(step.begin_ns), spans.unix_ns(step.end_ns)
        yield TraceSlice(kind=f"step {step.step}", begin_ns=begin, end_ns=end, is_whole=True, **of_step)
        for device, group in ((False, step.spans), (True, step.device_spans)):
            waits = iter(arrivals.get(key, []) if device == bool(step.device_spans) else [])
            for kind, begin_ns, end_ns in group:
                piece = TraceSlice(
                    kind=kind,
                    begin_ns=spans.unix_ns(begin_ns),
                    end_ns=spans.unix_ns(end_ns),
                    is_on_device=device,
                    **of_step,
                )
                yield piece
                if kind == "exchange" and (arrival := next(waits, None)) is not None:
                    last, error = arrival
                    until = min(last, piece.end_ns)
                    if until - piece.begin_ns > error + _clock_error(spans):
                        yield replace(piece, kind="wait", end_ns=until)
        yield from _slice_operations(spans, step, of_step)
    for rare in spans.rare:
        yield TraceSlice(
            kind=rare.kind,
            begin_ns=spans.unix_ns(rare.begin_ns),
            end_ns=spans.unix_ns(rare.end_ns),
            epoch=rare.epoch,
            step=rare.step,
            **common,
        )


def _slice_operations(spans: RankSpans, step: StepSpans, of_step: dict[str, Any]) -> Iterator[TraceSlice]:
    """Yields a slice per collective operation of a step; slices that overlap get different lanes."""
    busy_until: list[int] = []
    for name, ready_ns, begin_ns, end_ns in step.operations:
        lane = next((n for n, until in enumerate(busy_until) if until <= begin_ns), len(busy_until))
        busy_until[lane : lane + 1] = [end_ns]
        yield TraceSlice(
            kind=name,
            begin_ns=spans.unix_ns(begin_ns),
            end_ns=spans.unix_ns(end_ns),
            lane=lane + 1,
            ready_ns=spans.unix_ns(ready_ns),
            **of_step,
        )


def _key_steps(spans: RankSpans) -> Iterator[tuple[_Key, StepSpans]]:
    """Yields each step with a key that is the same on all ranks.

    The key also counts repetitions, because a step runs again after a rollback.
    """
    times: defaultdict[int, int] = defaultdict(int)
    for step in spans.steps:
        yield (spans.start, step.step, times[step.step]), step
        times[step.step] += 1


def _last_arrivals(ranks: Sequence[RankSpans]) -> _Arrivals:
    """Returns, per `exchange` span of a step, the begin on the last rank and the last rank's clock error.

    Leaves out steps that some ranks have not recorded, or in which ranks have different numbers of exchanges.
    """
    begins: defaultdict[_Key, list[list[tuple[int, int]]]] = defaultdict(list)
    sizes: dict[int, int] = {}
    for spans in ranks:
        sizes[spans.start] = spans.size
        error = _clock_error(spans)
        for key, step in _key_steps(spans):
            group = step.device_spans or step.spans
            begins[key].append(
                [(spans.unix_ns(begin), error) for kind, begin, _ in group if kind == "exchange"]
            )
    return {
        key: [max(times) for times in zip(*of_ranks, strict=True)]
        for key, of_ranks in begins.items()
        if len(of_ranks) == sizes[key[0]] and len({len(times) for times in of_ranks}) == 1
    }
