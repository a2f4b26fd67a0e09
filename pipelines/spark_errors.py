"""Turns Spark failures of a known cause into one sentence in place of a JVM trace."""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager

MARK = "ringspark: "
"""Stands in front of a task's error sentence, so that the driver finds it in Spark's report."""

_TASK_ERROR = re.compile(rf"RuntimeError: {MARK}(.*)")

# What a plan of ours raises by `raise_error`, since Spark 4 and before.
_RAISED = re.compile(
    rf"(?:\[USER_RAISED_EXCEPTION\]|RuntimeException:) {MARK}(.*?)(?: SQLSTATE: \w+)?$", re.MULTILINE
)
_MISSING_MODULE = re.compile(r"No module named '(ringspark|pyarrow|pandas|numpy|torch)")


@contextmanager
def python_workers() -> Iterator[None]:
    """Wraps a Spark job that runs our code in Python workers, and explains its known failures.

    Raises:
        RuntimeError: The workers run another Python than the driver, or lack the package; or a task
            failed with an error that `named` raised.
        ValueError: The plan met rows that it refuses.
    """
    try:
        yield
    except Exception as error:
        failed = _TASK_ERROR.search(str(error))
        if failed is not None:
            raise RuntimeError(failed[1].strip()) from None
        if (raised := _RAISED.search(str(error))) is not None:
            raise ValueError(raised[1]) from None
        missing = _MISSING_MODULE.search(str(error))
        if missing is None:
            raise
        raise RuntimeError(
            f"Spark's Python workers cannot import {missing[1]}; install ringspark where the executors run, "
            "and set PYSPARK_PYTHON to that Python before Spark starts (on one machine: sys.executable)"
        ) from None


@contextmanager
def named(sentence: str) -> Iterator[None]:
    """Wraps a task's work on a store, so that its failure reaches the user on the driver as one sentence.

    Raises:
        RuntimeError: The work failed; the message has `sentence` and the cause. Spark retries the task
            as often as it is configured to.
    """
    try:
        yield
    except OSError as error:
        cause = " ".join(str(error).split())
        raise RuntimeError(f"{MARK}{sentence} ({type(error).__name__}: {cause})") from error
