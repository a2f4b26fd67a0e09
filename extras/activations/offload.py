"""Stores offloaded tensors until the backward pass, in pinned host memory or in an unlinked file.

After Rhu et al. 2016, "vDNN". Only the graph of the forward pass refers to a store, so memory and file are
freed with the graph.
"""

from __future__ import annotations

import os
import tempfile
import weakref
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch._guards import detect_fake_mode

# Returns the unchanged vector on its device.
Restore = Callable[[], torch.Tensor]
# Stores a vector: a contiguous tensor of one dimension.
Store = Callable[[torch.Tensor], Restore]


def make_store(offload: str, device: torch.device) -> Store | None:
    """Makes the store of one forward pass; None for offload "none"."""
    if offload == "none":
        return None
    if device.type == "meta" or detect_fake_mode() is not None:
        return _keep_nothing
    if offload == "disk":
        return _File().put
    if device.type == "cpu":
        raise ValueError(
            "activationOffload 'host' moves activations from a GPU to the host's memory, got device 'cpu'; "
            "set activationOffload='disk'"
        )
    return _keep_pinned


def _keep_nothing(values: torch.Tensor) -> Restore:
    """Stores nothing, for meta and fake tensors, whose bytes are only counted."""
    return partial(torch.empty, values.numel(), dtype=values.dtype, device=values.device)


def _keep_pinned(values: torch.Tensor) -> Restore:
    """Stores a vector in pinned memory.

    The copies run on the stream that computes, so later work on it can use the freed device memory.
    """
    device = values.device
    pinned = torch.empty(values.numel(), dtype=values.dtype, pin_memory=True)
    pinned.copy_(values, non_blocking=True)
    written = torch.cuda.Event()  # type: ignore[no-untyped-call]
    written.record(torch.cuda.current_stream(device))

    def restore() -> torch.Tensor:
        # The backward pass may run on another stream than the forward pass.
        written.wait(torch.cuda.current_stream(device))
        return pinned.to(device, non_blocking=True)

    return restore


class _File:
    """Stores vectors in an unlinked temporary file, which no crash can leave behind."""

    def __init__(self) -> None:
        self._fd: int | None = None
        self._size = 0

    def put(self, values: torch.Tensor) -> Restore:
        start = self._size
        data = _bytes_of(values.cpu())
        try:
            fd = self._open()
            while data:
                written = os.pwrite(fd, data, self._size)
                self._size += written
                data = data[written:]
        except OSError as error:
            raise OSError(
                f"activationOffload 'disk' could not write {values.nbytes:,} bytes after {start:,} to a file "
                f"in {tempfile.gettempdir()}: {error.strerror}; make room there, point TMPDIR to a larger "
                "disk, or set activationCompression, which writes less"
            ) from error
        return partial(self._get, start, values.numel(), values.dtype, values.device)

    def _get(self, start: int, count: int, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        values = torch.empty(count, dtype=dtype, pin_memory=device.type == "cuda")
        into = _bytes_of(values)
        while into:
            read = os.preadv(self._open(), [into], start)
            if not read:
                raise OSError(
                    f"activationOffload 'disk' found its file in {tempfile.gettempdir()} shorter than it was "
                    "written; point TMPDIR to another disk"
                )
            start += read
            into = into[read:]
        return values.to(device, non_blocking=True)

    def _open(self) -> int:
        if self._fd is None:
            # Not in a `with`, because the file lives as long as the graph.
            file = tempfile.TemporaryFile(buffering=0)  # noqa: SIM115
            weakref.finalize(self, file.close)
            self._fd = file.fileno()
        return self._fd


def _bytes_of(values: torch.Tensor) -> memoryview:
    array: Any = values.view(torch.uint8).numpy()
    return memoryview(array)
