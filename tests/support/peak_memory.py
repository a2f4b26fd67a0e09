"""Exact peak and remaining bytes of torch's allocator while a function runs."""

import gc
import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile


@dataclass(frozen=True, kw_only=True)
class MemoryUse:
    """Bytes above the memory in use before.

    Attributes:
        peak: Maximum at any moment.
        kept: Bytes at the end.
    """

    peak: int
    kept: int


def peak_bytes(step: Callable[[], object], device: str = "cpu") -> int:
    """Returns the peak bytes of `step` on `device`, above the memory in use before."""
    return memory_use(step, device).peak


def memory_use(step: Callable[[], object], device: str = "cpu") -> MemoryUse:
    """Runs `step` and counts. Its return value counts as kept, and is then dropped."""
    return _cuda(step) if device.startswith("cuda") else _cpu(step)


def _cuda(step: Callable[[], object]) -> MemoryUse:
    gc.collect()  # do not count cycles of an earlier run
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    result = step()
    torch.cuda.synchronize()
    use = MemoryUse(
        peak=torch.cuda.max_memory_allocated() - before, kept=torch.cuda.memory_allocated() - before
    )
    del result
    return use


def _cpu(step: Callable[[], object]) -> MemoryUse:
    gc.collect()  # do not count cycles of an earlier run
    recorder = profile(activities=[ProfilerActivity.CPU], profile_memory=True)
    with _quiet():
        recorder.start()
    try:
        result = step()
    finally:
        with _quiet():
            recorder.stop()
    del result
    peak = now = 0
    for size in _changes(recorder):
        now += size
        peak = max(peak, now)
    return MemoryUse(peak=peak, kept=now)


@contextmanager
def _quiet() -> Iterator[None]:
    """Hides the lines that torch's profiler writes to stderr at every start and stop."""
    sys.stderr.flush()
    stderr = os.dup(2)
    nowhere = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, 2)
    try:
        yield
    finally:
        os.dup2(stderr, 2)
        os.close(stderr)
        os.close(nowhere)


def _changes(recorder: Any) -> Iterator[int]:
    """Returns the bytes of every allocation in order of time; releases are negative.

    Reads the recorded events, because the profiler's sums per operation take minutes. Releases of earlier
    memory are left out, because this run did not allocate it.
    """
    events: list[tuple[int, int, int]] = []
    pending = list(recorder.profiler.kineto_results.experimental_event_tree())
    while pending:
        event = pending.pop()
        pending.extend(event.children)
        if event.name == "[memory]" and event.extra_fields.device.type == "cpu":
            fields = event.extra_fields
            events.append((event.start_time_ns, fields.ptr, fields.alloc_size))
    held = set()
    for _, address, size in sorted(events, key=lambda item: item[0]):
        if size > 0:
            held.add(address)
            yield size
        elif address in held:
            held.remove(address)
            yield size
