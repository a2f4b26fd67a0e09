"""Memory measurements without saved-tensor hooks or clocks."""

import gc
from collections.abc import Callable
from itertools import accumulate

import pytest
from torch.profiler import ProfilerActivity, profile

CountBytes = Callable[[Callable[[], object]], tuple[int, int]]


@pytest.fixture
def count_bytes() -> CountBytes:
    """Returns a function that runs its argument and returns the bytes left allocated and the peak."""

    def count(function: Callable[[], object]) -> tuple[int, int]:
        # Free the garbage of earlier tests before the measurement.
        gc.collect()
        with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
            # Keep a reference, so that the result is freed only after the profile.
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
