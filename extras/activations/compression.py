"""Codecs for saved tensors, and the mode that shows which operation saves a tensor.

After Jain et al. 2018, "Gist": one bit per element is enough for two operations. The backward pass of ReLU
needs only the signs of the outputs, and the backward pass of dropout only which factors are zero. A hook
cannot see which operation saves a tensor, so a `TorchFunctionMode` watches the calls.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from functools import cache
from itertools import product
from typing import Any

import torch
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode

Parts = tuple[torch.Tensor, ...]

# Eight booleans are eight bytes 0 or 1, so one 64-bit word: a multiplication gathers their bits in its top
# byte, and another spreads a byte over a word again (little-endian, like all machines that run torch).
_GATHER = 0x0102040810204080
_SPREAD = 0x0101010101010101
# Byte i of the word keeps bit i; negative, because the word is signed.
_SELECT = 0x8040201008040201 - 2**64

# Values that share an offset and a scale.
BLOCK = 256


@dataclass(frozen=True, kw_only=True)
class BlockFormat:
    """One byte per value, and two fp32 numbers per block: offset and scale.

    The offset is 0 unless the values are closer to each other than to 0; then it is their midpoint, which
    keeps their digits. The largest distance d from the offset becomes the code `largest`. A value that
    differs from the offset gets at least the code `smallest`, so it keeps its sign. Error: with int8 at most
    d / 252, or d / 126 for values below d / 126; with fp8 at most 1/16 of the value or d / 200,000, whichever
    is larger. NaN or Inf makes all values of its block NaN or Inf: a loss scaler must still see an overflow.

    Attributes:
        shrink: Distance by which values move to 0 before `smallest` moves them away from 0. With int8 the sum
            is half a code, because the cast truncates.
    """

    dtype: torch.dtype
    largest: float
    smallest: float
    shrink: float


BLOCK_FORMATS = {
    "int8": BlockFormat(dtype=torch.int8, largest=126.0, smallest=1.0, shrink=0.5),
    "fp8": BlockFormat(dtype=torch.float8_e4m3fn, largest=416.0, smallest=2.0**-9, shrink=2.0**-9),
}


def pack_bits(values: torch.Tensor) -> torch.Tensor:
    """Packs n booleans into bytes (ceil(n / 8),); the first value is the lowest bit of the first byte."""
    values = values.view(-1)
    padding = -values.numel() % 8
    if padding:
        values = torch.cat([values, values.new_zeros(padding)])
    elif values.storage_offset() % 8:
        values = values.clone()  # a word must begin at a multiple of its size
    return values.view(torch.int64).mul(_GATHER).bitwise_right_shift_(56).to(torch.uint8)


def unpack_bits(packed: torch.Tensor, count: int) -> torch.Tensor:
    """Undoes `pack_bits` for `count` values."""
    words = packed.to(torch.int64).mul_(_SPREAD).bitwise_and_(_SELECT)
    return words.view(torch.uint8)[:count].ne(0)


@dataclass(frozen=True, kw_only=True)
class Blocks:
    """Shape of the blocks that share a scale: `rows` values of one column of a (n / width, width) matrix."""

    width: int = 1
    rows: int = BLOCK


def on_cpu(tensor: torch.Tensor) -> bool:
    """Returns whether the tensor is on a CPU; `quantize` then uses small chunks and vectorized operations."""
    return tensor.device.type == "cpu"


def quantize(values: torch.Tensor, block_format: BlockFormat, blocks: Blocks) -> Parts:
    """Converts contiguous values; their number must be a multiple of `blocks.width`.

    Returns the codes (blocks, rows, width), padded with copies of the last row, and the offsets and scales,
    each (blocks, 1, width) in fp32.
    """
    if padding := -values.numel() // blocks.width % blocks.rows:
        values = values.view(-1, blocks.width)
        values = torch.cat([values, values[-1:].expand(padding, -1)])
    values = values.view(-1, blocks.rows, blocks.width)
    # A chunk fits into the cache of a CPU. A GPU starts kernels slowly, so nearly all tensors are one chunk.
    most = 1024 * BLOCK if on_cpu(values) else 2**26
    if values.numel() <= most:
        return _encode(values, block_format)
    codes = torch.empty(values.shape, dtype=block_format.dtype, device=values.device)
    offsets, scales = torch.empty(2, len(values), 1, blocks.width, device=values.device)
    columns = max(1, min(blocks.width, most // blocks.rows))
    step = max(1, most // blocks.rows // columns)
    for i, j in product(range(0, len(values), step), range(0, blocks.width, columns)):
        chunk = slice(i, i + step), slice(None), slice(j, j + columns)
        codes[chunk], offsets[chunk], scales[chunk] = _encode(values[chunk], block_format)
    return codes, offsets, scales


def _encode(values: torch.Tensor, block_format: BlockFormat) -> Parts:
    values = values.float()
    if on_cpu(values):
        lowest, highest = values.amin(1, keepdim=True), values.amax(1, keepdim=True)
    else:
        lowest, highest = torch.aminmax(values, dim=1, keepdim=True)
    offsets = torch.lerp(lowest, highest, 0.5)
    offsets.masked_fill_(offsets.abs() <= highest - lowest, 0)
    centered = values - offsets
    if on_cpu(values):
        distance = torch.maximum(highest - offsets, offsets - lowest)
    else:
        distance = torch.linalg.vector_norm(centered, torch.inf, 1, keepdim=True)
    # A block of equal values would divide by zero.
    scales = distance.div_(block_format.largest).clamp_min_(torch.finfo(torch.float32).tiny)
    codes = F.softshrink(centered / scales, block_format.shrink)
    codes.add_(centered.sign_(), alpha=block_format.smallest)
    return codes.to(block_format.dtype), offsets, scales


def dequantize(parts: Parts, dtype: torch.dtype) -> torch.Tensor:
    """Undoes `quantize` except for the rounding and the padding; computes in fp32."""
    codes, offsets, scales = parts
    values = codes.to(dtype)  # exact
    return torch.addcmul(offsets, values, scales, out=values)


@dataclass(frozen=True)
class TensorCodec:
    """Encodes contiguous memory as several parts; decodes it from the parts, number of values and dtype."""

    encode: Callable[[torch.Tensor], Parts]
    decode: Callable[[Parts, int, torch.dtype], torch.Tensor]


RAW = TensorCodec(lambda values: (values,), lambda parts, count, dtype: parts[0])
# A mask, exactly: one bit per value.
BOOLEANS = TensorCodec(
    lambda values: (pack_bits(values),), lambda parts, count, dtype: unpack_bits(parts[0], count)
)
# Where a gradient passes ReLU. It passes at a NaN, as in torch's own backward.
SIGNS = TensorCodec(
    lambda values: (pack_bits(values.le(0).logical_not_()),),
    lambda parts, count, dtype: unpack_bits(parts[0], count).to(dtype),
)


def _dropout_factors(kept: float) -> TensorCodec:
    """Stores which of dropout's factors are 0; unpacking sets all other factors to 1 / `kept`."""
    return TensorCodec(
        lambda values: (pack_bits(values.ne(0)),),
        lambda parts, count, dtype: unpack_bits(parts[0], count).to(dtype).div_(kept),
    )


@cache  # the codec is a part of a tensor's key
def in_blocks(block_format: BlockFormat, blocks: Blocks) -> TensorCodec:
    """Returns the codec of `quantize`."""
    return TensorCodec(
        lambda values: quantize(values, block_format, blocks),
        lambda parts, count, dtype: dequantize(parts, dtype),
    )


@dataclass(frozen=True, kw_only=True)
class Saving:
    """How to store the tensors that an operation saves.

    Attributes:
        codec: Codec of these tensors; None if the operation has none of its own.
        rounds: Whether the tensors may be rounded; see `_LINEAR`.
        largest: Number of elements of the operation's largest activation.
        channels: Dimension whose slices may differ in magnitude; each slice gets its own scales.
    """

    codec: TensorCodec | None = None
    rounds: bool = False
    largest: int = 0
    channels: int = -1


NOTHING = Saving()


class ForwardMode(TorchFunctionMode):
    """Tells the hooks which operation runs."""

    def __init__(self, saving: Callable[[Saving], AbstractContextManager[None]]) -> None:
        super().__init__()
        self._saving = saving

    def __torch_function__(
        self, func: Callable[..., Any], types: object, args: Any = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        if func in _RELU:
            with self._saving(Saving(codec=SIGNS)):
                return func(*args, **kwargs)
        if func in _DROPOUT:
            values, p, inplace = _DROPOUT[func](*args, **kwargs)
            if _draws_factors(values, p):
                return self._drop(values, p, inplace)
        saving = NOTHING
        if func in _LINEAR or func in _OF_CHANNELS:
            largest = _largest((*args, *kwargs.values()))
            saving = Saving(rounds=True, largest=largest, channels=-1 if func in _LINEAR else 1)
        with self._saving(saving):
            return func(*args, **kwargs)

    def _drop(self, values: torch.Tensor, p: float, inplace: bool) -> torch.Tensor:
        """Repeats `at::dropout` with the same random numbers and arithmetic."""
        kept = 1 - p
        factors = torch.empty_like(values).bernoulli_(kept).div_(kept)
        with self._saving(Saving(codec=_dropout_factors(kept))):
            return values.mul_(factors) if inplace else values * factors


def _draws_factors(values: torch.Tensor, p: float) -> bool:
    """Returns whether torch's dropout would save factors; its CUDA kernel saves booleans."""
    return (
        torch.is_grad_enabled()
        and values.requires_grad
        and 0 < p < 1
        and values.numel() > 0
        and values.device.type in ("cpu", "meta")
    )


# Operations whose backward pass only multiplies by the saved activations, so small errors stay small. All
# other operations save exact values: a division or logarithm divides by them, which magnifies the error of a
# small value, and a rounded attention score changes all probabilities of its row.
_LINEAR = {
    *(F.linear, F.bilinear, torch.mm, torch.bmm, torch.matmul, torch.addmm, torch.baddbmm, torch.einsum),
    *(getattr(torch.Tensor, name) for name in ("mm", "bmm", "matmul", "__matmul__", "__rmatmul__")),
    *(getattr(torch.Tensor, name) for name in ("addmm", "baddbmm", "mul", "__mul__", "__rmul__", "multiply")),
    *(torch.mul, torch.multiply, F.layer_norm, torch.layer_norm, F.rms_norm, torch.rms_norm),
}
_OF_CHANNELS = {
    *(F.batch_norm, torch.batch_norm),
    *(getattr(F, f"conv{name}{n}d") for name in ("", "_transpose") for n in (1, 2, 3)),
    *(getattr(F, f"{name}_pool{n}d") for name in ("max", "avg", "adaptive_avg") for n in (1, 2, 3)),
    *(getattr(torch, f"max_pool{n}d") for n in (1, 2, 3)),
}
_RELU = {F.relu, torch.relu, torch.relu_, torch.Tensor.relu, torch.Tensor.relu_}
# The arguments of each dropout -> the values, the probability of 0, and whether it works in place.
_DROPOUT: dict[Callable[..., Any], Callable[..., tuple[torch.Tensor, float, bool]]] = {
    F.dropout: lambda input, p=0.5, training=True, inplace=False: (input, p if training else 0.0, inplace),
    torch.dropout: lambda input, p, train: (input, p if train else 0.0, False),
    torch.dropout_: lambda input, p, train: (input, p if train else 0.0, True),
}


def _largest(arguments: Iterable[Any]) -> int:
    """Returns the number of elements of the largest tensor in arguments and lists; skips parameters."""
    largest = 0
    for argument in arguments:
        for value in argument if isinstance(argument, list | tuple) else (argument,):
            if isinstance(value, torch.Tensor) and not isinstance(value, torch.nn.Parameter):
                largest = max(largest, value.numel())
    return largest
