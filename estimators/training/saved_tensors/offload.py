"""Stores offloaded tensors until the backward pass, in pinned host memory or in a file without a name.

After Rhu et al. 2016, "vDNN: Virtualized Deep Neural Networks for Scalable, Memory-Efficient Neural Network
Design". The bytes are not changed. A store belongs to one forward pass, and only its graph refers to it:
when the graph is freed, after the backward pass or by an exception, so are memory and file.
"""

from __future__ import annotations

import os
import tempfile
import weakref
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch._guards import detect_fake_mode


class Handle(Protocol):
    """A reference to one stored vector."""

    def get(self) -> torch.Tensor:
        """Returns the unchanged vector on its device."""
        ...


class Store(Protocol):
    """Stores vectors: contiguous tensors of one dimension."""

    def put(self, values: torch.Tensor) -> Handle: ...


def make_store(offload: str, device: torch.device) -> Store | None:
    """Makes the store of one forward pass; None for offload "none".

    Raises:
        ValueError: `offload` is "host", and the tensors are on the host already.
    """
    if offload == "none":
        return None
    if device.type == "meta" or detect_fake_mode() is not None:
        return _EmptyStore()
    if offload == "disk":
        return _DiskStore()
    if device.type == "cpu":
        raise ValueError(
            "activationOffload 'host' moves activations from a GPU to the host's memory, got device 'cpu'; "
            "set activationOffload='disk'"
        )
    return _HostStore()


class _EmptyStore:
    """Stores nothing, for meta and fake tensors: only the bytes that stay on the device are counted."""

    def put(self, values: torch.Tensor) -> Handle:
        return _EmptyHandle(values.numel(), values.dtype, values.device)


@dataclass(frozen=True, slots=True)
class _EmptyHandle:
    count: int
    dtype: torch.dtype
    device: torch.device

    def get(self) -> torch.Tensor:
        return torch.empty(self.count, dtype=self.dtype, device=self.device)


class _HostStore:
    """Stores vectors in pinned memory, which torch reuses in the next step.

    The copies run on the stream that computes: nothing waits on the host, and later work on that stream
    can use the freed device memory.
    """

    def put(self, values: torch.Tensor) -> Handle:
        pinned = torch.empty(values.numel(), dtype=values.dtype, pin_memory=True)
        pinned.copy_(values, non_blocking=True)
        event = torch.cuda.Event()  # type: ignore[no-untyped-call]
        event.record(torch.cuda.current_stream(values.device))
        return _HostHandle(pinned, values.device, event)


@dataclass(frozen=True, slots=True)
class _HostHandle:
    pinned: torch.Tensor
    device: torch.device
    written: torch.cuda.Event

    def get(self) -> torch.Tensor:
        # The backward pass may run on another stream than the forward pass did.
        self.written.wait(torch.cuda.current_stream(self.device))
        return self.pinned.to(self.device, non_blocking=True)


class _DiskStore:
    """Stores vectors in an unlinked file in `tempfile.gettempdir()`, which no crash can leave behind."""

    def __init__(self) -> None:
        self._fd: int | None = None
        self._size = 0

    def put(self, values: torch.Tensor) -> Handle:
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
        return _DiskHandle(self, start, values.numel(), values.dtype, values.device)

    def read(self, into: memoryview, start: int) -> None:
        fd = self._open()
        while into:
            count = os.preadv(fd, [into], start)
            if not count:
                raise OSError(
                    f"activationOffload 'disk' found its file in {tempfile.gettempdir()} shorter than it was "
                    "written; point TMPDIR to another disk"
                )
            start += count
            into = into[count:]

    def _open(self) -> int:
        if self._fd is None:
            # Not in a `with`, because the file lives as long as the graph.
            file = tempfile.TemporaryFile(buffering=0)  # noqa: SIM115
            weakref.finalize(self, file.close)
            self._fd = file.fileno()
        return self._fd


@dataclass(frozen=True, slots=True)
class _DiskHandle:
    store: _DiskStore
    start: int
    count: int
    dtype: torch.dtype
    device: torch.device

    def get(self) -> torch.Tensor:
        values = torch.empty(self.count, dtype=self.dtype, pin_memory=self.device.type == "cuda")
        self.store.read(_bytes_of(values), self.start)
        return values.to(self.device, non_blocking=True)


def _bytes_of(values: torch.Tensor) -> memoryview:
    array: Any = values.view(torch.uint8).numpy()
    return memoryview(array)
