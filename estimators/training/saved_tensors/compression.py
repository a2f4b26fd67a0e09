"""Codecs for saved tensors, and the mode that shows which operation saves a tensor.

After Jain et al. 2018, "Gist": one bit per element is enough for two operations. The backward pass of ReLU
needs only the signs of the outputs, and the backward pass of dropout only which factors are zero. A hook
cannot see which operation saves a tensor, so a `TorchFunctionMode` watches the calls.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode

Parts = tuple[torch.Tensor, ...]
BlockFormat = Literal["int8", "fp8"]

# Eight booleans are eight bytes 0 or 1, so one 64-bit word: a multiplication gathers their bits in its top
# byte, and another spreads a byte over a word again (little-endian, like all machines that run torch).
_GATHER = 0x0102040810204080
_SPREAD = 0x0101010101010101
# Byte i of the word keeps bit i; negative, because the word is signed.
_SELECT = 0x8040201008040201 - 2**64

# "int8" and "fp8" store a byte per value and an fp32 scale per block. The largest finite magnitude of a
# block becomes the largest finite code, ±126 or ±416. Other codes are Inf and NaN: a loss scaler must still
# see an overflow, and a mask of -Inf must stay one. The error of a value is at most 1/252 of the block's
# largest with int8; with fp8 at most 1/16 of the value, unless that is below 1/26,000 of the block's largest.
BLOCK = 256
# Values converted at a time, so that temporaries stay small compared with the result.
_CHUNK = 1024 * BLOCK
_FP8 = torch.float8_e4m3fn
_LARGEST = {"int8": 126.0, "fp8": 416.0}


def pack_bits(values: torch.Tensor) -> torch.Tensor:
    """Packs booleans (n,) into bytes (ceil(n / 8),); the first value is the lowest bit of the first byte."""
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


def quantize(values: torch.Tensor, block_format: BlockFormat) -> tuple[torch.Tensor, torch.Tensor]:
    """Converts values (n,) to codes, bytes (n,), and scales, fp32 (ceil(n / BLOCK),)."""
    count = values.numel()
    codes = torch.empty(count, dtype=torch.uint8, device=values.device)
    scales = torch.empty(-(-count // BLOCK), dtype=torch.float32, device=values.device)
    for start, stop in _chunks(count):
        chunk = torch.zeros(-(-(stop - start) // BLOCK) * BLOCK, device=values.device)
        chunk[: stop - start] = values[start:stop]
        blocks = chunk.view(-1, BLOCK)
        largest = blocks.abs().nan_to_num_(nan=0.0, posinf=0.0).amax(1)
        # A block of zeros would divide by zero.
        scale = largest.div_(_LARGEST[block_format]).clamp_min_(torch.finfo(torch.float32).tiny)
        encoded = _encode(blocks.div_(scale[:, None]), block_format)
        codes[start:stop] = encoded.view(-1)[: stop - start]
        scales[start // BLOCK : -(-stop // BLOCK)] = scale
    return codes, scales


def dequantize(
    codes: torch.Tensor, scales: torch.Tensor, block_format: BlockFormat, dtype: torch.dtype
) -> torch.Tensor:
    """Undoes `quantize` except for the rounding."""
    count = codes.numel()
    table = _table(block_format, codes.device)
    values = torch.empty(count, dtype=dtype, device=codes.device)
    for start, stop in _chunks(count):
        chunk = table.index_select(0, codes[start:stop].to(torch.int32))
        whole = (stop - start) // BLOCK * BLOCK
        first = start // BLOCK
        chunk[:whole].view(-1, BLOCK).mul_(scales[first : first + whole // BLOCK, None])
        if whole < stop - start:
            chunk[whole:].mul_(scales[-1])
        values[start:stop] = chunk
    return values


def _chunks(count: int) -> Iterator[tuple[int, int]]:
    return ((start, min(start + _CHUNK, count)) for start in range(0, count, _CHUNK))


def _encode(scaled: torch.Tensor, block_format: BlockFormat) -> torch.Tensor:
    if block_format == "fp8":
        # 448, the code after 416, means Inf and no finite value. NaN stays NaN.
        return scaled.clamp_(-448, 448).to(_FP8).view(torch.uint8)
    # Code 0 is NaN, 1 and 255 are -Inf and +Inf, 128 is zero.
    return scaled.round_().nan_to_num_(nan=-128.0, posinf=127.0, neginf=-127.0).add_(128).to(torch.uint8)


def _table(block_format: BlockFormat, device: torch.device) -> torch.Tensor:
    """Returns the values of the 256 codes, relative to the scale."""
    codes = torch.arange(256, device=device, dtype=torch.uint8)
    if block_format == "fp8":
        values, beyond = codes.view(_FP8).float(), 448.0
    else:
        values, beyond = codes.float() - 128, 127.0
        values = values.masked_fill(values < -beyond, torch.nan)
    return torch.where(values.abs() == beyond, values * torch.inf, values)


@dataclass(frozen=True)
class TensorCodec:
    """Encodes a vector as several parts; decodes it from the parts, the number of values and the dtype."""

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


def _blocks(block_format: BlockFormat) -> TensorCodec:
    return TensorCodec(
        lambda values: quantize(values, block_format),
        lambda parts, count, dtype: dequantize(parts[0], parts[1], block_format, dtype),
    )


LOSSY = {"int8": _blocks("int8"), "fp8": _blocks("fp8")}

# Sets the codec of an operation's saved tensors, if known, and the number of elements of its largest
# activation, while the operation runs.
Saving = Callable[[TensorCodec | None, int], AbstractContextManager[None]]


class ForwardMode(TorchFunctionMode):
    """Tells the hooks which operation runs."""

    def __init__(self, saving: Saving) -> None:
        super().__init__()
        self._saving = saving

    def __torch_function__(
        self, func: Callable[..., Any], types: object, args: Any = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        if func in _RELU:
            with self._saving(SIGNS, 0):
                return func(*args, **kwargs)
        if func in _DROPOUT:
            values, p, inplace = _DROPOUT[func](*args, **kwargs)
            if _draws_factors(values, p):
                return self._drop(values, p, inplace)
        with self._saving(None, _largest((*args, *kwargs.values()))):
            return func(*args, **kwargs)

    def _drop(self, values: torch.Tensor, p: float, inplace: bool) -> torch.Tensor:
        """Repeats `at::dropout` with the same random numbers and arithmetic."""
        kept = 1 - p
        factors = torch.empty_like(values).bernoulli_(kept).div_(kept)
        with self._saving(_dropout_factors(kept), 0):
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
