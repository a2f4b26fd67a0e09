"""Reads ranges of a Parquet file in a store; each of Arrow's reads becomes one request to the store.

fsspec's own files read ahead in whole blocks (50 MiB on S3), request the file's size, and cannot be
interrupted.
"""

from __future__ import annotations

import asyncio
import io
import threading
import time
from collections.abc import Callable
from concurrent.futures import wait
from typing import Any

import pyarrow as pa

from ringspark.pipelines import storage
from ringspark.pipelines.readers.prefetch import Closed, closed_check

READ_SECONDS = 180.0
"""Timeout for one range, in seconds. The client's own retries could take half an hour."""

_POLL_SECONDS = 0.05
# Opening a file again reads its footer again; Arrow requests the last 64 KiB first.
_LARGEST_TAIL = 1 << 20
_ALL_TAILS = 64 << 20


class Tails:
    """Cache of the last bytes of files, which hold the Parquet footers. Thread-safe."""

    def __init__(self) -> None:
        self._tails: dict[str, bytes] = {}
        self._num_bytes = 0
        self._lock = threading.Lock()

    def get(self, path: str) -> bytes:
        return self._tails.get(path, b"")

    def put(self, path: str, tail: bytes) -> None:
        with self._lock:
            more = len(tail) - len(self.get(path))
            if more > 0 and len(tail) <= _LARGEST_TAIL and self._num_bytes + more <= _ALL_TAILS:
                self._tails[path] = tail
                self._num_bytes += more


class RangeFile(io.RawIOBase):
    """A read-only file that turns every `read` into one ranged request."""

    def __init__(
        self, uri: str, num_bytes: int, tails: Tails, closed: Callable[[], bool] | None = None
    ) -> None:
        self._uri = uri
        self._fs, self._path = storage.filesystem(uri)
        self._num_bytes = num_bytes
        self._tails = tails
        self._is_closed = closed or (lambda: False)
        self._position = 0
        self._file: Any = None

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def tell(self) -> int:
        return self._position

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        start = {io.SEEK_SET: 0, io.SEEK_CUR: self._position, io.SEEK_END: self._num_bytes}[whence]
        self._position = start + offset
        return self._position

    def read(self, size: int = -1) -> bytes:
        """Returns bytes from the current position. Raises Closed if the consumer has closed the reader."""
        start = self._position
        stop = self._num_bytes if size < 0 else min(start + size, self._num_bytes)
        if start >= stop:
            return b""
        tail = self._tails.get(self._path)
        tail_start = self._num_bytes - len(tail)
        if start >= tail_start:
            data = tail[start - tail_start : stop - tail_start]
        elif stop > tail_start:
            longer = self._fetch(start, tail_start) + tail
            self._tails.put(self._path, longer)
            data = longer[: stop - start]
        else:
            data = self._fetch(start, stop)
            if stop == self._num_bytes:
                self._tails.put(self._path, data)
        self._position = stop
        return data

    def _fetch(self, start: int, stop: int) -> bytes:
        with storage.store_errors(f"bytes {start} to {stop} of {self._path.rpartition('/')[2]!r}"):
            data = self._read_range(start, stop)
            if len(data) != stop - start:
                # Arrow would report a short read as a damaged file, which is not retried.
                raise OSError(f"received only {len(data)} bytes")
        return data

    def close(self) -> None:
        if self._file is not None:
            self._file.close()
            self._file = None
        super().close()

    def _read_range(self, start: int, stop: int) -> bytes:
        if not getattr(self._fs, "async_impl", False):
            # E.g. HDFS: one open file is cheaper than one per range. Its reads cannot be interrupted.
            if self._file is None:
                self._file = self._fs.open(self._path, "rb")
            self._file.seek(start)
            return bytes(self._file.read(stop - start))
        read = self._fs._cat_file(self._path, start=start, end=stop)
        future: Any = asyncio.run_coroutine_threadsafe(read, self._fs.loop)
        deadline = time.monotonic() + READ_SECONDS
        while not wait([future], timeout=_POLL_SECONDS).done:
            if self._is_closed():
                future.cancel()
                raise Closed
            if time.monotonic() >= deadline:
                future.cancel()
                raise TimeoutError(f"no answer within {READ_SECONDS:g} s")
        return bytes(future.result())


def open_ranges(uri: str, num_bytes: int, tails: Tails) -> Any:
    """Opens a file for Arrow in the thread that reads it: a `RangeFile`, or Arrow's own file on a disk."""
    return pa.OSFile(uri) if storage.is_local(uri) else RangeFile(uri, num_bytes, tails, closed_check())
