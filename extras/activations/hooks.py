"""Chooses a codec for each saved tensor, packs the tensor once, and restores it.

Invariant: a tensor that several operations save is stored once. The key of a tensor has the address of its
storage and its version. A weak reference to the storage keeps the address from being reused, and in-place
changes increase the version. The restored tensor has the strides of the saved tensor: kernels choose
algorithms by strides, so other strides would change bits.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from functools import lru_cache, partial
from typing import Literal

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.multiprocessing.reductions import StorageWeakRef

from ringspark.extras.activations.compression import (
    BLOCK,
    BLOCK_FORMATS,
    BOOLEANS,
    NOTHING,
    RAW,
    Blocks,
    ForwardMode,
    Saving,
    TensorCodec,
    in_blocks,
)
from ringspark.extras.activations.offload import Restore, Store, make_store, version_error

Density = Literal["dense", "gaps", "overlapping"]
# Arguments of `as_strided`: size, stride, offset.
Geometry = tuple[tuple[int, ...], tuple[int, ...], int]

# Packing gains nothing below a page of a file or of memory.
SMALL_BYTES = 4096
# No lossy codec for tensors below this fraction of the operation's largest (means, deviations: one number
# per row): the gradient depends on all their digits.
SMALL_SHARE = 8
# With fewer values, the two numbers of a block would take more bytes than rounding saves.
FEW_VALUES = 8

_LOSSY_DTYPES = (torch.float32, torch.bfloat16, torch.float16)
# Nodes whose output is a view or a copy of their input, or the input in autocast's dtype.
_SAME_VALUES = frozenset(
    f"{name}Backward0"
    for name in (
        *("T", "Transpose", "Permute", "View", "UnsafeView", "ReshapeAlias", "AsStrided", "Alias"),
        *("Expand", "Squeeze", "Unsqueeze", "Select", "Slice", "Split", "SplitWithSizes", "Unbind"),
        *("ToCopy", "Clone"),
    )
)


@dataclass(frozen=True, kw_only=True, slots=True)
class Flat:
    """A part of a storage as contiguous memory, and the saved tensor as a view of that memory."""

    values: torch.Tensor
    key: tuple[object, ...]  # differs from other parts of the same storage and dtype
    geometry: Geometry  # of the view


def density(tensor: torch.Tensor) -> Density:
    """Returns "dense" if there are no gaps, "overlapping" if elements may share addresses, else "gaps"."""
    span = 1
    result: Density = "dense"
    for stride, size in sorted((s, n) for s, n in zip(tensor.stride(), tensor.shape, strict=True) if n > 1):
        if stride < span:
            return "overlapping"
        if stride > span:
            result = "gaps"
        span += stride * (size - 1)
    return result


def flatten_values(tensor: torch.Tensor) -> Flat:
    """Returns the tensor's elements: in memory order if it is dense, else copied without gaps."""
    key = (tensor.storage_offset(), tensor.shape, tensor.stride())
    if density(tensor) != "dense":
        tensor = tensor.contiguous()
    values = tensor if tensor.is_contiguous() else tensor.as_strided((tensor.numel(),), (1,))
    return Flat(values=values, key=key, geometry=(tuple(tensor.shape), tensor.stride(), 0))


def flatten_memory(tensor: torch.Tensor) -> Flat:
    """Returns the memory that the tensor spans, or its whole storage if it spans at least half of it.

    So the query, key and value of one projection are stored once together.
    """
    start = int(tensor.storage_offset())
    stop = start + 1 + sum((n - 1) * s for n, s in zip(tensor.shape, tensor.stride(), strict=True))
    count = tensor.untyped_storage().nbytes() // tensor.itemsize
    if 2 * (stop - start) >= count:
        start, stop = 0, count
    return Flat(
        values=tensor.as_strided((stop - start,), (1,), start),
        key=(start, stop),
        geometry=(tuple(tensor.shape), tensor.stride(), int(tensor.storage_offset()) - start),
    )


def _decode(
    parts: tuple[torch.Tensor | Restore, ...], codec: TensorCodec, count: int, dtype: torch.dtype
) -> torch.Tensor:
    # In reverse, because a store starts copies in the reverse order of `put`.
    found = [part if isinstance(part, torch.Tensor) else part() for part in reversed(parts)]
    return codec.decode(tuple(found[::-1]), count, dtype)


def _check_version(tensor: torch.Tensor, version: int) -> torch.Tensor:
    if tensor._version != version:
        raise version_error(tensor.shape, tensor._version, version)
    return tensor


@contextmanager
def saved_tensor_hooks(
    *, offload: str, compression: str, module: nn.Module, device: torch.device
) -> Iterator[None]:
    """Offloads or compresses the tensors that a forward pass saves in this context.

    The pass raises OSError if the disk of offload "disk" is full or fails.

    Args:
        offload: Value of `TrainConfig.activation_offload`.
        compression: Value of `TrainConfig.activation_compression`.
        device: Tensors on other devices are not touched. On "meta", offloaded tensors are not kept.
    """
    if not torch.is_grad_enabled() or (offload == "none" and compression == "none"):
        yield
        return
    saved = SavedTensors(module, device, compression, make_store(offload, device))
    mode = nullcontext() if compression == "none" else ForwardMode(saved.saving)
    try:
        with torch.autograd.graph.saved_tensors_hooks(saved.pack, saved.unpack), mode:
            yield
    finally:
        # The graph keeps the hooks alive, so drop the data that only the forward pass needs.
        saved.end_forward()


class SavedTensors:
    """The hooks of one forward pass and its backward pass; autograd calls `pack` and `unpack`."""

    def __init__(
        self, module: nn.Module, device: torch.device, compression: str, store: Store | None
    ) -> None:
        self._device = device.type
        self._compresses = compression != "none"
        self._blocks = BLOCK_FORMATS.get(compression)
        self._store = store
        held = itertools.chain(module.parameters(), module.buffers())
        self._held = {_address(tensor) for tensor in held if not _is_foreign(tensor)}
        self._packed: dict[object, tuple[StorageWeakRef, Restore]] = {}
        self._saving = NOTHING
        # Successive nodes of the backward pass often need the same vector: views of it, or several layers
        # over one input. Read and written as one tuple, because CUDA's backward runs in other threads.
        self._last: tuple[Restore, torch.Tensor, int] | None = None

    @contextmanager
    def saving(self, saving: Saving) -> Iterator[None]:
        """Uses `saving` for all tensors that are saved inside the context."""
        before, self._saving = self._saving, saving
        try:
            yield
        finally:
            self._saving = before

    @torch.no_grad()
    def pack(self, tensor: torch.Tensor) -> Restore:
        codec = None if self._stays(tensor) else self._codec_of(tensor)
        if codec is None:
            return partial(_check_version, tensor, tensor._version)
        flat = flatten_memory(tensor) if codec is RAW else flatten_values(tensor)
        # Without `flat` itself, which holds the values.
        return partial(self._view, self._pack_once(tensor, flat, codec), flat.geometry)

    @torch.no_grad()
    def unpack(self, restore: Restore) -> torch.Tensor:
        return restore()

    def end_forward(self) -> None:
        self._packed.clear()
        self._held.clear()
        if self._store is not None:
            self._store.end_forward()

    def _stays(self, tensor: torch.Tensor) -> bool:
        return (
            tensor.device.type != self._device
            or _is_foreign(tensor)
            or tensor.nbytes < SMALL_BYTES
            or _address(tensor) in self._held
            or _is_parameter(tensor)
        )

    def _codec_of(self, tensor: torch.Tensor) -> TensorCodec | None:
        rest = None if self._store is None else RAW
        if not self._compresses:
            return rest
        layout = density(tensor)
        if layout == "dense" and tensor.dtype == torch.bool:
            return BOOLEANS
        if layout == "dense" and self._saving.codec is not None and tensor.is_floating_point():
            return self._saving.codec
        if self._blocks and self._is_lossy(tensor) and layout != "overlapping":
            like = tensor if layout == "dense" else torch.empty(tensor.shape, device="meta")
            if blocks := find_blocks(tuple(tensor.shape), like.stride(), self._saving.channels):
                return in_blocks(self._blocks, blocks)
        return rest

    def _is_lossy(self, tensor: torch.Tensor) -> bool:
        """Returns whether a tensor may be rounded: large, with a gradient, saved by a suitable operation.

        The batch, masks, and tensors saved by a user's autograd function stay exact.
        """
        return (
            self._saving.rounds
            and tensor.numel() * SMALL_SHARE > self._saving.largest
            and tensor.requires_grad
            and tensor.dtype in _LOSSY_DTYPES
        )

    def _pack_once(self, tensor: torch.Tensor, flat: Flat, codec: TensorCodec) -> Restore:
        key = (_address(tensor), flat.key, tensor.dtype, tensor._version, codec)
        if key not in self._packed:
            parts = codec.encode(flat.values)
            put = self._store.put if self._store else None
            moved = tuple(put(part) if put and part.nbytes >= SMALL_BYTES else part for part in parts)
            packed = partial(_decode, moved, codec, flat.values.numel(), tensor.dtype)
            reference = StorageWeakRef(tensor.untyped_storage())  # type: ignore[no-untyped-call]
            self._packed[key] = reference, packed
        return self._packed[key][1]

    def _view(self, packed: Restore, geometry: Geometry) -> torch.Tensor:
        last = self._last
        if last is None or last[0] is not packed or last[1]._version != last[2]:
            # Released first, so that only one vector is in memory.
            self._last = last = None
            values = packed()
            self._last = last = packed, values, values._version
        return last[1].as_strided(*geometry)


@lru_cache  # called for each saved tensor of each step
def find_blocks(shape: tuple[int, ...], strides: tuple[int, ...], channels: int) -> Blocks | None:
    """Returns blocks that never mix values of two channels; None if they would have too few values.

    `channels` is the index of the channel dimension. With four or more dimensions and channels next to each
    other in memory, a block also stays within one head of attention, or one row of pixels.
    """
    sizes = sorted((stride, size) for stride, size in zip(strides, shape, strict=True) if size > 1)
    if len(shape) < 2 or not sizes:
        return None
    run = strides[channels] if shape[channels] > 1 else math.prod(shape)
    if run > 1:  # the values of a channel are next to each other
        rows = _divisor(run)
        if rows >= FEW_VALUES:
            return Blocks(rows=rows)
        # Small images, such as 2 x 2: each pixel of each channel has one scale for up to 256 images.
        width, outer = sizes[-1][0], sizes[-1][1]
        of_images = shape[0] == outer >= FEW_VALUES and strides[0] == width
        return Blocks(width=width, rows=_even(outer)) if of_images else None
    width = shape[channels]
    rows = math.prod(shape) // width
    if len(shape) > 3:
        rows = _divisor(sizes[1][1])
        return Blocks(width=width, rows=rows) if rows >= FEW_VALUES else None
    return Blocks(width=width, rows=_even(rows)) if rows >= FEW_VALUES else None


def _divisor(count: int) -> int:
    """Returns the largest divisor that is at most `BLOCK`."""
    return next(size for size in range(min(count, BLOCK), 0, -1) if count % size == 0)


def _even(count: int) -> int:
    """Returns the rows of blocks of about equal size."""
    return -(-count // -(-count // BLOCK))


def _address(tensor: torch.Tensor) -> int:
    return int(tensor.untyped_storage()._cdata)


def _is_foreign(tensor: torch.Tensor) -> bool:
    """Returns whether the tensor is anything other than strided memory."""
    return (
        # A fake tensor counts as a plain one.
        type(tensor) not in (torch.Tensor, nn.Parameter, FakeTensor)
        or tensor.layout != torch.strided
        or tensor.is_quantized
        or tensor.is_conj()
        or tensor.is_neg()
    )


def _is_parameter(tensor: torch.Tensor) -> bool:
    """Returns whether the tensor is a parameter; FSDP2 may have made it after the pass began."""
    if isinstance(tensor, nn.Parameter) or isinstance(tensor._base, nn.Parameter):
        return True
    node = tensor.grad_fn
    while node is not None and node.name() in _SAME_VALUES:
        node = node.next_functions[0][0]
    return tensor.requires_grad if tensor.is_leaf else node is not None and "AccumulateGrad" in node.name()
