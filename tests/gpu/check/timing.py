"""Times and memory on a GPU or the CPU.

A call only queues work on the GPU, so the clock is read after the device has finished. Compared cases run in
interleaved rounds, so that a change of the GPU's clock rate affects all of them.
"""

from __future__ import annotations

import gc
import math
import time
from collections.abc import Callable, Mapping, Sequence
from statistics import median

import torch

from check.part import Setup

MIB = 2**20
# A round is long compared with the start of a kernel and the resolution of the clock.
_ROUND_SECONDS = 0.1
_MOST_CALLS = 500


def synchronize(device: str) -> None:
    if device.startswith("cuda"):
        torch.cuda.synchronize(device)


def seconds_of(call: Callable[[], object], device: str, count: int = 1) -> float:
    """Returns the seconds of one of `count` calls, to the end of their last kernel."""
    synchronize(device)
    start = time.perf_counter()
    for _ in range(count):
        call()
    synchronize(device)
    return (time.perf_counter() - start) / count


def compare(cases: Mapping[str, Callable[[], object]], setup: Setup) -> dict[str, list[float]]:
    """Returns the seconds of one call of each case, per round. Warm-up calls do not count."""
    counts = {}
    for name, call in cases.items():
        # The first call allocates and chooses kernels; the second one fills torch's cache of memory.
        for _ in range(1 if setup.is_tiny else 3):
            call()
        once = seconds_of(call, setup.device)
        wanted = math.ceil(_ROUND_SECONDS / max(once, 1e-9))
        counts[name] = 1 if setup.is_tiny else max(1, min(_MOST_CALLS, wanted))
    rounds: dict[str, list[float]] = {name: [] for name in cases}
    for _ in range(setup.rounds):
        for name, call in cases.items():
            rounds[name].append(seconds_of(call, setup.device, counts[name]))
    return rounds


def ratio(values: Sequence[float], reference: Sequence[float]) -> float:
    """Returns the median over the rounds of value / reference."""
    return median(value / base for value, base in zip(values, reference, strict=True))


def milliseconds(values: Sequence[float]) -> float:
    return 1000 * median(values)


def held_mib(call: Callable[[], object], setup: Setup) -> float | None:
    """Returns the device memory that the result of `call` keeps, in MiB; None on the CPU."""
    return _memory(call, setup, peak=False)


def peak_mib(call: Callable[[], object], setup: Setup) -> float | None:
    """Returns the most device memory during `call` above the memory before, in MiB; None on the CPU."""
    return _memory(call, setup, peak=True)


def _memory(call: Callable[[], object], setup: Setup, *, peak: bool) -> float | None:
    if not setup.on_gpu:
        call()
        return None
    gc.collect()
    torch.cuda.synchronize(setup.device)
    before = torch.cuda.memory_allocated(setup.device)
    torch.cuda.reset_peak_memory_stats(setup.device)
    result = call()
    torch.cuda.synchronize(setup.device)
    read = torch.cuda.max_memory_allocated if peak else torch.cuda.memory_allocated
    found = (read(setup.device) - before) / MIB
    del result
    return found
