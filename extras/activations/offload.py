"""Stores offloaded tensors until the backward pass, in pinned host memory or in an unlinked file.

After Rhu et al. 2016, "vDNN". Only the graph of the forward pass refers to a store, so memory and file are
freed with the graph.

Copies between GPU and host run on a side stream, in the order in which they start. Invariant: the computing
stream waits for a copy before it uses, frees or reuses memory that the copy reads or writes. So no result and
no peak of memory depends on timing.
"""

from __future__ import annotations

import os
import tempfile
import weakref
from collections import deque
from collections.abc import Callable
from functools import cache, partial
from typing import Any

import torch
from torch._guards import detect_fake_mode

# Returns the unchanged tensor on its device.
Restore = Callable[[], torch.Tensor]
# Tensors that the forward pass keeps on the device while they are copied.
_LEAVING = 2


def version_error(shape: torch.Size, version: int, expected: int) -> RuntimeError:
    """Returns the error of autograd, which does not check versions of tensors that hooks return."""
    return RuntimeError(
        "one of the variables needed for gradient computation has been modified by an inplace operation: "
        f"{tuple(shape)} is at version {version}, expected version {expected}"
    )


def make_store(offload: str, device: torch.device) -> Store | None:
    """Makes the store of one forward pass; None for offload "none"."""
    if offload == "none":
        return None
    if device.type == "meta" or detect_fake_mode() is not None:
        return Store()
    if offload == "disk":
        return _File()
    if device.type == "cpu":
        raise ValueError(
            "activationOffload 'host' moves activations from a GPU to the host's memory, got device 'cpu'; "
            "set activationOffload='disk'"
        )
    return HostStore(_side_stream(device))


class Store:
    """Stores nothing, for meta and fake tensors, whose bytes are only counted."""

    def put(self, values: torch.Tensor) -> Restore:
        """Stores a contiguous tensor."""
        return partial(torch.empty, values.shape, dtype=values.dtype, device=values.device)

    def end_forward(self) -> None:
        """Frees the memory that only the forward pass needs."""


class Copies:
    """Copies tensors between device and host, and keeps free host buffers. This class copies at once."""

    def __init__(self) -> None:
        self._free: dict[int, list[torch.Tensor]] = {}

    def take(self, size: int) -> torch.Tensor:
        """Returns a buffer of `size` bytes. An earlier copy may still read it, but copies run in order."""
        try:
            return self._free[size].pop()
        except LookupError:
            # Other batches have other sizes, so the free buffers may never fit again.
            self._free.clear()
            return self.allocate(size)

    def give(self, buffer: torch.Tensor) -> None:
        self._free.setdefault(buffer.numel(), []).append(buffer)

    def allocate(self, size: int) -> torch.Tensor:
        return torch.empty(size, dtype=torch.uint8)

    def start(self, target: torch.Tensor, source: torch.Tensor) -> Any:
        """Starts a copy after all work that was queued before; both tensors must live until `wait`."""
        target.copy_(source)

    def wait(self, copy: Any, values: torch.Tensor) -> None:
        """Lets later work wait until the copy is done; `values` is the device's tensor."""


class _SideStream(Copies):
    def __init__(self, device: torch.device) -> None:
        super().__init__()
        self._stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]

    def allocate(self, size: int) -> torch.Tensor:
        return torch.empty(size, dtype=torch.uint8, pin_memory=True)

    def start(self, target: torch.Tensor, source: torch.Tensor) -> Any:
        computing = torch.cuda.current_stream(self._stream.device)
        self._stream.wait_stream(computing)
        with torch.cuda.stream(self._stream):
            target.copy_(source, non_blocking=True)
        return self._stream.record_event(), computing

    def wait(self, copy: Any, values: torch.Tensor) -> None:
        done, computing = copy
        computing.wait_event(done)
        current = torch.cuda.current_stream(self._stream.device)
        if current != computing:  # the backward pass may run on another stream than the forward pass
            current.wait_event(done)
            values.record_stream(current)


_side_stream = cache(_SideStream)  # so that the buffers last from step to step


class HostStore(Store):
    """Stores tensors in host memory."""

    def __init__(self, copies: Copies) -> None:
        self._copies = copies
        self._leaving: deque[_Stored] = deque()
        self._last: Callable[[], _Stored | None] = lambda: None

    def put(self, values: torch.Tensor) -> Restore:
        stored = _Stored(self._copies, values, self._copies.take(values.nbytes), self._last)
        self._last = weakref.ref(stored)
        self._leaving.append(stored)
        if len(self._leaving) > _LEAVING:
            self._leaving.popleft().leave()
        return stored.restore

    def end_forward(self) -> None:
        while self._leaving:
            self._leaving.popleft().leave()


class _Stored:
    """One tensor in host memory. Its first `restore` starts to copy the tensor that was stored before it."""

    def __init__(
        self, copies: Copies, values: torch.Tensor, buffer: torch.Tensor, before: Callable[[], _Stored | None]
    ) -> None:
        self._copies, self._buffer, self._before = copies, buffer, before
        self._arriving: tuple[Any, torch.Tensor] | None = None
        self._is_restored = False
        self._like = partial(torch.empty, values.shape, dtype=values.dtype, device=values.device)
        self._host = buffer.view(values.dtype).view(values.shape)
        self._expected = self._version = values._version
        self._leaving: tuple[Any, torch.Tensor] | None = None  # also if the copy cannot start
        self._leaving = copies.start(self._host, values), values

    def leave(self) -> None:
        """Releases the tensor on the device."""
        if self._leaving is not None:
            self._copies.wait(*self._leaving)
            self._version = self._leaving[1]._version
            self._leaving = None

    def restore(self) -> torch.Tensor:
        self.leave()
        if self._version != self._expected:  # the copy may have read the changed values
            raise version_error(self._host.shape, self._version, self._expected)
        copy, values = self._arriving or self._fetch()
        self._copies.wait(copy, values)
        self._arriving, self._is_restored = None, True
        before = self._before()
        if before is not None and not before._is_restored and before._arriving is None:
            before._arriving = before._fetch()
        return values

    def _fetch(self) -> tuple[Any, torch.Tensor]:
        values = self._like()
        return self._copies.start(values, self._host), values

    def __del__(self) -> None:
        self.leave()
        if self._arriving is not None:
            self._copies.wait(*self._arriving)
        self._copies.give(self._buffer)


class _File(Store):
    """Stores tensors in an unlinked temporary file, which no crash can leave behind."""

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
        return partial(self._get, start, values.shape, values.dtype, values.device)

    def _get(self, start: int, shape: torch.Size, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        values = torch.empty(shape, dtype=dtype, pin_memory=device.type == "cuda")
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
    return memoryview(array).cast("B")
