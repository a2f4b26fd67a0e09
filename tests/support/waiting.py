"""Waits for other processes and threads."""

import time
from collections.abc import Callable
from typing import TypeVar

T = TypeVar("T")


def wait_for(what: str, condition: Callable[[], T | None], seconds: float = 300.0) -> T:
    """Calls `condition` until its value is neither None nor False; fails with `what` at a timeout."""
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        value = condition()
        if value is not None and value is not False:
            return value
        time.sleep(0.02)
    raise AssertionError(f"waited {seconds:.0f} s for {what}")
