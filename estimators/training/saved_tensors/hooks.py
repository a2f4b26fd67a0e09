"""Chooses a codec for each saved tensor, packs the tensor once, and restores it.

Invariant: a tensor that several operations save is stored once, and never mistaken for another. Its key
holds the address of its storage object, which cannot be reused while a weak reference exists, and its
version, which every change in place increases.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.multiprocessing.reductions import StorageWeakRef

from ringspark.estimators.training.saved_tensors.compression import BOOLEANS, LOSSY, RAW, Codec
from ringspark.estimators.training.saved_tensors.layout import (
    Flat,
    Geometry,
    density,
    own_values,
    whole_memory,
)
from ringspark.estimators.training.saved_tensors.offload import Restore, Store

# Packing gains nothing below a page of a file or of memory.
SMALL_BYTES = 4096
# An operation also saves small tensors (means, deviations, logarithms of sums: one per row). They take
# little memory, and its gradient depends on every digit of them, so no lossy codec applies.
SMALL_SHARE = 8

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


def _decoded(
    parts: tuple[torch.Tensor | Restore, ...], codec: Codec, count: int, dtype: torch.dtype
) -> torch.Tensor:
    """Returns one stored vector, whose parts are in memory or in a store."""
    found = tuple(part if isinstance(part, torch.Tensor) else part() for part in parts)
    return codec.decode(found, count, dtype)


def _unchanged(tensor: torch.Tensor, version: int) -> torch.Tensor:
    """Returns a tensor that is not packed; autograd does not check versions of tensors that hooks return."""
    if tensor._version != version:
        raise RuntimeError(
            "one of the variables needed for gradient computation has been modified by an inplace operation: "
            f"{tuple(tensor.shape)} is at version {tensor._version}, expected version {version}"
        )
    return tensor


class SavedTensors:
    """The hooks of one forward pass and its backward pass; autograd calls `pack` and `unpack`."""

    def __init__(
        self, module: nn.Module, device: torch.device, compression: str, store: Store | None
    ) -> None:
        self._device = device.type
        self._compresses = compression != "none"
        self._lossy = LOSSY.get(compression)
        self._store = store
        held = itertools.chain(module.parameters(), module.buffers())
        self._held = {_address(tensor) for tensor in held if not _is_foreign(tensor)}
        self._packed: dict[object, tuple[StorageWeakRef, Restore]] = {}
        self._codec: Codec | None = None
        self._largest = 0
        # Successive nodes of the backward pass often need the same vector: views of it, or several layers
        # over one input. Read and written as one tuple, since CUDA's backward has threads of its own.
        self._last: tuple[Restore, torch.Tensor, int] | None = None

    @contextmanager
    def saving(self, codec: Codec | None, largest: int) -> Iterator[None]:
        """Sets the codec of an operation's saved tensors and the size of its largest one, while it runs."""
        before = self._codec, self._largest
        self._codec, self._largest = codec, largest
        try:
            yield
        finally:
            self._codec, self._largest = before

    @torch.no_grad()
    def pack(self, tensor: torch.Tensor) -> Restore:
        codec = None if self._stays(tensor) else self._codec_of(tensor)
        if codec is None:
            return partial(_unchanged, tensor, tensor._version)
        flat = whole_memory(tensor) if codec is RAW else own_values(tensor)
        # Without `flat` itself, which holds the values.
        return partial(self._view, self._pack_once(tensor, flat, codec), flat.geometry)

    @torch.no_grad()
    def unpack(self, restore: Restore) -> torch.Tensor:
        return restore()

    def end_forward(self) -> None:
        """Drops the data that only packing needs."""
        self._packed.clear()
        self._held.clear()

    def _stays(self, tensor: torch.Tensor) -> bool:
        return (
            tensor.device.type != self._device
            or _is_foreign(tensor)
            or tensor.nbytes < SMALL_BYTES
            or _address(tensor) in self._held
            or _is_parameter(tensor)
        )

    def _codec_of(self, tensor: torch.Tensor) -> Codec | None:
        rest = None if self._store is None else RAW
        if not self._compresses:
            return rest
        layout = density(tensor)
        if layout == "dense" and tensor.dtype == torch.bool:
            return BOOLEANS
        if layout == "dense" and self._codec is not None and tensor.is_floating_point():
            return self._codec
        is_big = tensor.numel() * SMALL_SHARE > self._largest
        if self._lossy and is_big and layout != "overlapping" and tensor.dtype in _LOSSY_DTYPES:
            return self._lossy
        return rest

    def _pack_once(self, tensor: torch.Tensor, flat: Flat, codec: Codec) -> Restore:
        key = (_address(tensor), flat.key, tensor.dtype, tensor._version, codec)
        if key not in self._packed:
            parts = codec.encode(flat.values)
            moved = tuple(
                self._store(part) if self._store and part.nbytes >= SMALL_BYTES else part for part in parts
            )
            packed = partial(_decoded, moved, codec, flat.values.numel(), tensor.dtype)
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


def _address(tensor: torch.Tensor) -> int:
    return int(tensor.untyped_storage()._cdata)


def _is_foreign(tensor: torch.Tensor) -> bool:
    """Returns whether the tensor is anything other than a strided piece of memory."""
    return (
        # A fake tensor counts as a plain one.
        type(tensor) not in (torch.Tensor, nn.Parameter, FakeTensor)
        or tensor.layout != torch.strided
        or tensor.is_quantized
        or tensor.is_conj()
        or tensor.is_neg()
    )


def _is_parameter(tensor: torch.Tensor) -> bool:
    """Returns whether the values are a parameter's, also if FSDP2 made it after the pass began."""
    if isinstance(tensor, nn.Parameter) or isinstance(tensor._base, nn.Parameter):
        return True
    node = tensor.grad_fn
    while node is not None and node.name() in _SAME_VALUES:
        node = node.next_functions[0][0]
    return tensor.requires_grad if tensor.is_leaf else node is not None and "AccumulateGrad" in node.name()
