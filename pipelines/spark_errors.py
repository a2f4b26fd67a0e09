"""Spark failures that have a known cause, said in one sentence instead of a JVM trace."""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager

# In front of the sentence that a task of ours fails with, so that it is found in Spark's report of it.
_MARK = "ringspark: "
_TASK_ERROR = re.compile(rf"RuntimeError: {_MARK}(.*)")

_MISSING_MODULE = re.compile(r"No module named '(ringspark|pyarrow|pandas|numpy|torch)")


@contextmanager
def python_workers() -> Iterator[None]:
    """Around a Spark job that runs our code in Python workers.

    Raises:
        RuntimeError: The workers run another Python than the driver, or lack the package; or a task
            failed with an error of `named`.
    """
    try:
        yield
    except Exception as error:
        failed = _TASK_ERROR.search(str(error))
        if failed is not None:
            raise RuntimeError(failed[1].strip()) from None
        missing = _MISSING_MODULE.search(str(error))
        if missing is None:
            raise
        raise RuntimeError(
            f"Spark's Python workers cannot import {missing[1]}; install ringspark where the executors run, "
            "and set PYSPARK_PYTHON to that Python before Spark starts (on one machine: sys.executable)"
        ) from None


@contextmanager
def named(sentence: str) -> Iterator[None]:
    """Around work on a store in a task: what fails there reaches the driver's user as one sentence.

    Raises:
        RuntimeError: With `sentence` and the cause. Spark runs the task again, as often as it is told to.
    """
    try:
        yield
    except OSError as error:
        cause = " ".join(str(error).split())
        raise RuntimeError(f"{_MARK}{sentence} ({type(error).__name__}: {cause})") from error
