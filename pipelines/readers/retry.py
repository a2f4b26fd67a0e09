"""Which read errors pass, and how long to wait for that."""

from __future__ import annotations

import logging
import time

import pyarrow as pa

from ringspark.pipelines import storage

MAX_ATTEMPTS = 4
FIRST_WAIT_SECONDS = 0.5

# A second look changes none of these. Arrow raises OSError for damaged files too: those are told
# from a lost connection only by trying again.
_PERMANENT = (
    FileNotFoundError,
    PermissionError,
    IsADirectoryError,
    NotADirectoryError,
    ValueError,  # pa.ArrowInvalid is one
    KeyError,
    TypeError,
    ImportError,
    MemoryError,
    pa.ArrowException,
)

_logger = logging.getLogger(__name__)


class Retries:
    """Counts the attempts at one row group and waits between them, twice as long each time."""

    def __init__(self) -> None:
        self.attempts = 1

    def reset(self) -> None:
        """Begins anew: a row group was read."""
        self.attempts = 1

    def again(self, uri: str, error: Exception) -> bool:
        """Waits and returns true, or returns false when it is not worth another attempt."""
        if storage.is_local(uri) or isinstance(error, _PERMANENT) or self.attempts >= MAX_ATTEMPTS:
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
        time.sleep(wait)
        return True
