"""Settings of glibc's malloc while a rank trains on the CPU."""

from __future__ import annotations

import ctypes
from collections.abc import Iterator
from contextlib import contextmanager

# Numbers of options in glibc's malloc.h.
_TRIM_THRESHOLD, _MMAP_THRESHOLD = -1, -3
# The most that glibc takes on 64-bit machines.
_LARGEST_MMAP_THRESHOLD = 32 << 20
_KEPT, _KEPT_LATER = 256 << 20, 64 << 20


@contextmanager
def keep_freed_memory() -> Iterator[None]:
    """Keeps up to 256 MiB of freed tensors in the process, and returns them to the kernel at the end.

    By default glibc returns most freed tensors at once, and the kernel fills the memory of the next ones with
    zeros, page by page: 12 to 20 % of a step of a small network. Does nothing without glibc.
    """
    library = ctypes.CDLL(None)
    if not hasattr(library, "mallopt") or not hasattr(library, "malloc_trim"):
        yield
        return
    library.mallopt(_MMAP_THRESHOLD, _LARGEST_MMAP_THRESHOLD)
    library.mallopt(_TRIM_THRESHOLD, _KEPT)
    try:
        yield
    finally:
        # Setting a threshold ends glibc's own adjustment, whose largest value this is.
        library.mallopt(_TRIM_THRESHOLD, _KEPT_LATER)
        library.malloc_trim(0)
