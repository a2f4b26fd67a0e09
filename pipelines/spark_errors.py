"""Explains a failed Spark job in one sentence if the cause is known."""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager

MARK = "ringspark: "
"""Prefix of error messages from tasks, by which the driver finds the message in Spark's report."""

_TASK_ERROR = re.compile(rf"RuntimeError: {MARK}(.*)")

# Message of `raise_error` in our plans, in the formats of Spark 4 and of earlier versions.
_RAISED = re.compile(
    rf"(?:\[USER_RAISED_EXCEPTION\]|RuntimeException:) {MARK}(.*?)(?: SQLSTATE: \w+)?$", re.MULTILINE
)
_UNREAD_FILE = re.compile(
    r"Encountered error while reading file (\S+?)\.?\s+(.*?)(?:Details:|SQLSTATE: \w+)?\s*$", re.MULTILINE
)
# A process that ended without an exception: killed, or taken away with its executor.
LOST_WORKER = re.compile(r"ExecutorLostFailure[^\n]*|Python worker exited[^\n]*")
# 137 is SIGKILL: usually memory, sometimes a lost host.
_KILLED_FOR_MEMORY = re.compile(r"memory|OOM|(?:code|status):? 137\b", re.IGNORECASE)
_MISSING_MODULE = re.compile(r"No module named '(ringspark|pyarrow|pandas|numpy|torch)")


@contextmanager
def explain_worker_errors(*, also_losses: bool = True) -> Iterator[None]:
    """Context of a Spark job that runs our code in Python workers; explains failures with a known cause.

    `also_losses`: Whether to explain lost workers; False for a gang, whose supervisor does.

    Raises:
        RuntimeError: A worker lacks a package or was lost, or a task failed inside `report_task_errors`.
        ValueError: An expression in the plan refused a row, or Spark cannot read a file.
    """
    try:
        yield
    except Exception as error:
        failed = _TASK_ERROR.search(str(error))
        if failed is not None:
            raise RuntimeError(failed[1].strip()) from None
        if (raised := _RAISED.search(str(error))) is not None:
            raise ValueError(raised[1]) from None
        if (unread := _UNREAD_FILE.search(str(error))) is not None:
            reason = f" ({unread[2].strip(' .')})" if unread[2].strip(" .") else ""
            raise ValueError(
                f"Spark cannot read the file {unread[1]}{reason}; remove it, or write it again with the same "
                "column types as the other files"
            ) from None
        if also_losses and (lost := LOST_WORKER.search(str(error))) is not None:
            reason = " ".join(lost[0].split())[:300]
            advice = advise_on_loss(reason) or "; see the log of that executor"
            raise RuntimeError(
                f"Spark lost the workers of a task in every attempt ({reason}){advice}"
            ) from None
        missing = _MISSING_MODULE.search(str(error))
        if missing is None:
            raise
        raise RuntimeError(
            f"Spark's Python workers cannot import {missing[1]}; install ringspark on the executors, and "
            "set PYSPARK_PYTHON to that Python before Spark starts (on one machine: sys.executable)"
        ) from None


def advise_on_loss(reason: str) -> str:
    """Returns the remedy for processes that were killed for memory; "" for any other reason."""
    if not _KILLED_FOR_MEMORY.search(reason):
        return ""
    return (
        "; raise spark.executor.memoryOverhead, from which Python workers take their memory "
        "(ringspark.estimators.plan_memory computes how much a training needs)"
    )


@contextmanager
def report_task_errors(sentence: str) -> Iterator[None]:
    """Context in a task: turns an OSError into one sentence that reaches the driver."""
    try:
        yield
    except OSError as error:
        cause = " ".join(str(error).split())
        raise RuntimeError(f"{MARK}{sentence} ({type(error).__name__}: {cause})") from error
