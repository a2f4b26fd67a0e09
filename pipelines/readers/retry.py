"""Decides which read errors may pass by themselves, and how long to wait.

The policy for row groups in a store (local files are read once):

- The store's own client tries first (s3fs: botocore 5 times, most errors 5 times
  around that), within seconds and without a word. `range_file.READ_SECONDS`
  bounds one read with all of it.
- What comes through is tried again from the row group that failed, up to
  MAX_ATTEMPTS times in all, after 0.5, 1 and 2 seconds. Row groups that arrived
  are not read again, and none is handed on twice. A row group that is read
  resets the count: a long epoch may meet many interruptions.
- Each further attempt is logged as a warning with its cause.
- Errors that another attempt cannot cure end the reading at once: a file that is
  missing or forbidden, a request that the store calls invalid, data that disagree
  with the manifest. The answers 503 (SlowDown) and 500, connections that are
  refused, reset or silent, and bodies that end too early are tried again.
- The last error reaches the consumer as one RuntimeError that names the file,
  the row group, the attempts, the cause and the remedy.
- Closing the batches ends a wait, and a read that is under way.

Small requests (sizes, listings, manifests) rely on the client's own attempts,
except where a reader makes them for a row group. So do writes, because Spark
runs a failed task again.
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

# Errors that no further attempt can cure. Arrow raises a bare OSError for damaged files too; only another
# attempt tells them from a lost connection.
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

# s3fs gives an OSError with one of these for InvalidRange, MethodNotAllowed and the like.
_PERMANENT_CODES = (errno.EINVAL, errno.EPERM, errno.ENOSYS, errno.ENAMETOOLONG)

_logger = logging.getLogger(__name__)


def may_pass(error: BaseException) -> bool:
    """Whether another attempt at the same read may succeed."""
    if isinstance(error, OSError) and error.errno in _PERMANENT_CODES:
        return False
    return isinstance(error, Exception) and not isinstance(error, _PERMANENT)


class Retries:
    """Counts the attempts at one row group and waits between them, twice as long each time."""

    def __init__(self) -> None:
        self.attempts = 1

    def reset(self) -> None:
        """Starts the count again, after a row group was read."""
        self.attempts = 1

    def again(self, uri: str, error: Exception) -> bool:
        """Waits and returns True, or returns False at once if another attempt is of no use.

        Raises:
            Closed: The consumer went away during the wait.
        """
        if storage.is_local(uri) or not may_pass(error) or self.attempts >= MAX_ATTEMPTS:
            return False
        wait = FIRST_WAIT_SECONDS * 2 ** (self.attempts - 1)
        _logger.warning(
            "reading %r failed (%s: %s), attempt %d of %d; the next in %g s",
            uri,
            type(error).__name__,
            error,
            self.attempts,
            MAX_ATTEMPTS,
            wait,
        )
        self.attempts += 1
        _wait(wait)
        return True


def _wait(seconds: float) -> None:
    """Waits, unless the consumer goes away meanwhile."""
    is_closed = closed_check()
    deadline = time.monotonic() + seconds
    while (left := deadline - time.monotonic()) > 0:
        if is_closed is not None and is_closed():
            raise Closed
        time.sleep(min(left, _POLL_SECONDS))
