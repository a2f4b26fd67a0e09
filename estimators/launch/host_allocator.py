"""Settings of glibc's malloc while a rank trains."""

from __future__ import annotations

import ctypes
import os
from collections.abc import Iterator
from contextlib import contextmanager

# Numbers of options in glibc's malloc.h.
_TRIM_THRESHOLD, _MMAP_THRESHOLD = -1, -3
# Largest value that glibc accepts on 64-bit machines.
_LARGEST_MMAP_THRESHOLD = 32 << 20
_KEPT, _KEPT_LATER = 256 << 20, 64 << 20
_VARIABLES = ("MALLOC_MMAP_THRESHOLD_", "MALLOC_TRIM_THRESHOLD_", "MALLOC_TOP_PAD_", "MALLOC_MMAP_MAX_")
_TUNABLES = "GLIBC_TUNABLES"


@contextmanager
def keep_freed_memory() -> Iterator[None]:
    """Keeps up to 256 MiB of freed memory in the process, and returns it to the kernel at the end.

    By default glibc returns large freed blocks at once. The kernel must then fill the memory of every new
    tensor with zeros, which takes 12 to 20 % of a step of a small network. Blocks above 32 MiB are still
    returned at once. Does nothing without glibc, or if the user has set one of its thresholds.
    """
    library = ctypes.CDLL(None)
    is_set = any(name in os.environ for name in _VARIABLES) or "glibc.malloc" in os.environ.get(_TUNABLES, "")
    if is_set or not hasattr(library, "mallopt") or not hasattr(library, "malloc_trim"):
        yield
        return
    library.mallopt(_MMAP_THRESHOLD, _LARGEST_MMAP_THRESHOLD)
    library.mallopt(_TRIM_THRESHOLD, _KEPT)
    try:
        yield
    finally:
        # glibc no longer adjusts a threshold that was set. It would choose at most this value.
        library.mallopt(_TRIM_THRESHOLD, _KEPT_LATER)
        library.malloc_trim(0)
