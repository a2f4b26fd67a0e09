"""Sets environment variables while a library or a new process reads them."""

from __future__ import annotations

import math
import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any


@contextmanager
def environment(values: Mapping[str, str | None]) -> Iterator[None]:
    """Sets environment variables inside the block (None removes one), then restores the old values.

    Spark reuses its Python workers, so variables left in `os.environ` would affect the next job.
    """
    before = {name: os.environ.get(name) for name in values}
    _set(values)
    try:
        yield
    finally:
        _set(before)


def _set(values: Mapping[str, str | None]) -> None:
    for name, value in values.items():
        if value is None:
            os.environ.pop(name, None)
        else:
            os.environ[name] = value


def count_cores(context: Any) -> int:
    """Returns the cores of a Spark task, rounded up: since Spark 4.3, they may be a part of one."""
    return math.ceil(getattr(context, "cpuAmount", context.cpus)()) or 1
