"""Counts that no saved-tensor hook and no clock takes part in."""

import gc
from collections.abc import Callable
from itertools import accumulate

import pytest
from torch.profiler import ProfilerActivity, profile

CountBytes = Callable[[Callable[[], object]], tuple[int, int]]


@pytest.fixture
def count_bytes() -> CountBytes:
    """Runs a function; returns the bytes it left allocated with what it returned, and its peak."""

    def count(function: Callable[[], object]) -> tuple[int, int]:
        # Garbage of earlier tests must not be freed inside.
        gc.collect()
        with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
            # Assigned, so that what is returned is freed after the profile only.
            result = function()
        assert profiler.profiler is not None
        assert result is not None
        events = profiler.profiler.kineto_results.events()
        changes = sorted(
            (e.start_ns(), i, e.nbytes()) for i, e in enumerate(events) if e.name() == "[memory]"
        )
        totals = list(accumulate(change for *_, change in changes))
        return totals[-1], max(totals)

    return count
