"""Spark failures that have a known cause, said in one sentence instead of a JVM trace."""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager

_MISSING_MODULE = re.compile(r"No module named '(ringspark|pyarrow|pandas|numpy|torch)")


@contextmanager
def python_workers() -> Iterator[None]:
    """Around a Spark job that runs our code in Python workers.

    Raises:
        RuntimeError: The workers run another Python than the driver, or lack the package.
    """
    try:
        yield
    except Exception as error:
        missing = _MISSING_MODULE.search(str(error))
        if missing is None:
            raise
        raise RuntimeError(
            f"Spark's Python workers cannot import {missing[1]}; install ringspark where the executors run, "
            "and set PYSPARK_PYTHON to that Python before Spark starts (on one machine: sys.executable)"
        ) from None
