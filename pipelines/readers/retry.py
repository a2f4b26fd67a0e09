"""Decides which read errors are retried, and how long to wait.

The store's client retries first. After that, a reader reads the failed row group again: after 0.5, 1 and 2
seconds, up to MAX_ATTEMPTS attempts in total. Local files are read only once.
"""

from __future__ import annotations

import errno
import logging
import time

import pyarrow as pa

from ringspark.pipelines import storage
from ringspark.pipelines.readers.prefetch import Closed, closed_check

MAX_ATTEMPTS = 4
FIRST_WAIT_SECONDS = 0.5

_POLL_SECONDS = 0.05

# Errors that a retry cannot cure. Arrow also raises a bare OSError for damaged files; only a retry
# distinguishes them from a lost connection.
_PERMANENT = (
    FileNotFoundError,
    PermissionError,
    IsADirectoryError,
    NotADirectoryError,
    ValueError,  # pa.ArrowInvalid is one
    LookupError,
    TypeError,
    ImportError,
    RuntimeError,
    MemoryError,
    pa.ArrowException,
)

# s3fs raises an OSError with one of these codes for InvalidRange, MethodNotAllowed etc.
_PERMANENT_CODES = (errno.EINVAL, errno.EPERM, errno.ENOSYS, errno.ENAMETOOLONG)

_logger = logging.getLogger(__name__)


def may_pass(error: BaseException) -> bool:
    if isinstance(error, OSError) and error.errno in _PERMANENT_CODES:
        return False
    return isinstance(error, Exception) and not isinstance(error, _PERMANENT)


class Retries:
    def __init__(self) -> None:
        self.attempts = 1

    def again(self, uri: str, error: Exception) -> bool:
        """Waits and returns True, or returns False at once if another attempt is useless."""
        if storage.is_local(uri) or not may_pass(error) or self.attempts >= MAX_ATTEMPTS:
            return False
        wait = FIRST_WAIT_SECONDS * 2 ** (self.attempts - 1)
        _logger.warning(
            "reading %r failed (%s: %s), attempt %d of %d; the next in %g s",
            uri, type(error).__name__, error, self.attempts, MAX_ATTEMPTS, wait,
        )  # fmt: skip
        self.attempts += 1
        is_closed = closed_check()
        deadline = time.monotonic() + wait
        while (left := deadline - time.monotonic()) > 0:
            if is_closed is not None and is_closed():
                raise Closed
            time.sleep(min(left, _POLL_SECONDS))
        return True
