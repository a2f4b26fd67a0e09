"""Spark failures that have a known cause, said in one sentence instead of a JVM trace."""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pyspark.sql import Column

# Marks a refusal raised inside a Spark expression, so that it is found in what Spark makes of it.
_MARK = "ringspark refuses: "
_REFUSAL = re.compile(re.escape(_MARK) + r"(.*?)(?: SQLSTATE|\n|$)")

_MISSING_MODULE = re.compile(r"No module named '(ringspark|pyarrow|pandas|numpy|torch)")


@contextmanager
def python_workers() -> Iterator[None]:
    """Around a Spark job that runs our code in Python workers.

    Raises:
        ValueError: The data was refused by an expression of `refusal`.
        RuntimeError: The workers run another Python than the driver, or lack the package.
    """
    try:
        yield
    except Exception as error:
        refused = _REFUSAL.search(str(error))
        if refused is not None:
            raise ValueError(refused[1].strip()) from None
        missing = _MISSING_MODULE.search(str(error))
        if missing is None:
            raise
        raise RuntimeError(
            f"Spark's Python workers cannot import {missing[1]}; install ringspark where the executors run, "
            "and set PYSPARK_PYTHON to that Python before Spark starts (on one machine: sys.executable)"
        ) from None


def refusal(message: Column) -> Column:
    """Returns a Spark expression that fails with a message which `python_workers` raises as ValueError."""
    from pyspark.sql import functions as F

    return F.raise_error(F.concat(F.lit(_MARK), message))
