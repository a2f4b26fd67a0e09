"""Codecs for saved tensors, and the mode that shows which operation saves a tensor.

After Jain et al. 2018, "Gist": one bit per element is enough for two operations. The backward pass of ReLU
needs only the signs of the outputs, and the backward pass of dropout only which factors are zero. A hook
cannot see which operation saves a tensor, so a `TorchFunctionMode` watches the calls.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager
from dataclasses import dataclass
from functools import cache
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

# "int8" and "fp8" store one byte per value, and two fp32 numbers per block: offset and scale. The offset is 0
# unless the values are closer to each other than to 0; then it is their midpoint, which keeps their digits.
# The largest distance d from the offset becomes the largest finite code, ±126 or ±416. Other codes are Inf
# and NaN, because a loss scaler must still see an overflow. A value other than 0 gets at least the smallest
# code, so it keeps its sign. Error: with int8 at most d / 252, or d / 126 for values below d / 126; with fp8
# at most 1/16 of the value or d / 200,000, whichever is larger.
BLOCK = 256
# Values converted at a time, so that temporaries stay small compared with the result.
_CHUNK = 1024 * BLOCK
_FP8 = torch.float8_e4m3fn
BLOCK_FORMATS: dict[str, BlockFormat] = {"int8": "int8", "fp8": "fp8"}
_LARGEST = {"int8": 126.0, "fp8": 416.0}
_SMALLEST = {"int8": 1.0, "fp8": 2.0**-9}


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


@dataclass(frozen=True, kw_only=True)
class Blocks:
    """Shape of the blocks that share a scale: `rows` values of one column of a (n / width, width) matrix."""

    width: int = 1
    rows: int = BLOCK

    def chunks(self, rows: torch.Tensor) -> Iterator[tuple[slice, slice, slice]]:
        """Yields chunks of about `_CHUNK` values: slices of the rows, of the columns, and of the blocks."""
        count = len(rows)
        columns = max(1, min(self.width, _CHUNK // self.rows))
        step = max(1, _CHUNK // self.rows // columns) * self.rows
        for start in range(0, count, step):
            stop, block = min(start + step, count), start // self.rows
            for first in range(0, self.width, columns):
                blocks = slice(block, block + -(-(stop - start) // self.rows))
                yield slice(start, stop), slice(first, first + columns), blocks


def quantize(
    values: torch.Tensor, block_format: BlockFormat, blocks: Blocks
) -> tuple[torch.Tensor, torch.Tensor]:
    """Converts values (n,); n must be a multiple of `blocks.width`.

    Returns codes, bytes (n,), and the middle and the scale of each block, fp32 (2 * number of blocks,).
    """
    rows = values.view(-1, blocks.width)
    codes = torch.empty(rows.shape, dtype=torch.uint8, device=values.device)
    scales = torch.empty(2, -(-len(rows) // blocks.rows), blocks.width, device=values.device)
    for part, columns, of_part in blocks.chunks(rows):
        chunk = rows[part, columns].float()
        count = len(chunk)
        # Repeats a row, which changes no minimum and no maximum.
        chunk = torch.cat([chunk, chunk[-1:].expand(-count % blocks.rows, -1)])
        chunk = chunk.view(-1, blocks.rows, chunk.shape[1])
        lowest = chunk.nan_to_num(nan=torch.inf, neginf=torch.inf).amin(1).nan_to_num_(posinf=0.0)
        highest = chunk.nan_to_num(nan=-torch.inf, posinf=-torch.inf).amax(1).nan_to_num_(neginf=0.0)
        middle = lowest / 2 + highest / 2
        is_far = middle.abs() > highest - lowest
        middle.masked_fill_(~is_far, 0)
        distance = torch.maximum(highest - middle, middle - lowest)
        # A block of equal values would divide by zero.
        scale = distance.div_(_LARGEST[block_format]).clamp_min_(torch.finfo(torch.float32).tiny)
        scaled = (chunk - middle[:, None]).div_(scale[:, None])
        smallest = torch.full_like(scaled, _SMALLEST[block_format]).copysign_(scaled)
        is_lifted = (scaled.abs() < smallest.abs()) & (chunk != 0) & ~is_far[:, None]
        scaled = torch.where(is_lifted, smallest, scaled)
        codes[part, columns] = _encode(scaled, block_format).view(-1, chunk.shape[2])[:count]
        scales[0, of_part, columns], scales[1, of_part, columns] = middle, scale
    return codes.view(-1), scales.view(-1)


def dequantize(
    codes: torch.Tensor,
    scales: torch.Tensor,
    block_format: BlockFormat,
    dtype: torch.dtype,
    blocks: Blocks,
) -> torch.Tensor:
    """Undoes `quantize` except for the rounding; returns (n,)."""
    table = _table(block_format, codes.device)
    codes, scales = codes.view(-1, blocks.width), scales.view(2, -1, blocks.width)
    values = torch.empty(codes.shape, dtype=dtype, device=codes.device)
    for part, columns, of_part in blocks.chunks(codes):
        chunk = table[codes[part, columns].to(torch.int32)]
        middle, scale = scales[:, of_part, columns].repeat_interleave(blocks.rows, 1)[:, : len(chunk)]
        values[part, columns] = chunk.mul_(scale).add_(middle)
    return values.view(-1)


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


@cache  # the codec is a part of a tensor's key
def in_blocks(block_format: BlockFormat, blocks: Blocks) -> TensorCodec:
    """Returns the codec of `quantize`."""
    return TensorCodec(
        lambda values: quantize(values, block_format, blocks),
        lambda parts, count, dtype: dequantize(parts[0], parts[1], block_format, dtype, blocks),
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
