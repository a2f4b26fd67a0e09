"""Codecs for saved tensors, and the mode that tells which operation saves a tensor.

After Jain et al. 2018, "Gist: Efficient Data Encoding for Deep Neural Network Training". Autograd's nodes
stay torch's own; only the tensors that they save are encoded. ReLU's node only needs to know where its
output is `> 0`, and dropout's factor is zero or one constant: one bit each, exactly. A hook cannot see for
which node a tensor is saved, so a `TorchFunctionMode` watches the calls.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

import torch
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode

from ringspark.estimators.training.saved_tensors.bits import pack_bits, unpack_bits
from ringspark.estimators.training.saved_tensors.blocks import BlockFormat, dequantise, quantise

Parts = tuple[torch.Tensor, ...]


@dataclass(frozen=True)
class Codec:
    """Encodes vectors to stored parts, and decodes parts to a number of values of a dtype."""

    encode: Callable[[torch.Tensor], Parts]
    decode: Callable[[Parts, int, torch.dtype], torch.Tensor]


RAW = Codec(lambda values: (values,), lambda parts, count, dtype: parts[0])
# A mask, exactly: one bit per value.
BOOLEANS = Codec(
    lambda values: (pack_bits(values),),
    lambda parts, count, dtype: unpack_bits(parts[0], count),
)
# Where a gradient passes ReLU. It passes at a NaN, as in torch's own backward.
SIGNS = Codec(
    lambda values: (pack_bits(values.le(0).logical_not_()),),
    lambda parts, count, dtype: unpack_bits(parts[0], count).to(dtype),
)


def _dropout_factors(kept: float) -> Codec:
    """Stores which of dropout's factors are 0; the others are 1 / `kept`, divided again in `dtype`."""
    return Codec(
        lambda values: (pack_bits(values.ne(0)),),
        lambda parts, count, dtype: unpack_bits(parts[0], count).to(dtype).div_(kept),
    )


def _blocks(block_format: BlockFormat) -> Codec:
    """Stores eight bits per value: see `blocks`."""
    return Codec(
        lambda values: quantise(values, block_format),
        lambda parts, count, dtype: dequantise(parts[0], parts[1], block_format, dtype),
    )


LOSSY = {"int8": _blocks("int8"), "fp8": _blocks("fp8")}

# Sets the codec of saved tensors, if known, and the number of elements of the largest activation, while an
# operation runs.
Saving = Callable[[Codec | None, int], AbstractContextManager[None]]


class ForwardMode(TorchFunctionMode):
    """Watches one forward pass and tells the hooks which operation runs."""

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
        """Repeats `at::dropout` step by step, with the same random numbers, arithmetic and node."""
        kept = 1 - p
        factors = torch.empty_like(values).bernoulli_(kept).div_(kept)
        with self._saving(_dropout_factors(kept), 0):
            return values.mul_(factors) if inplace else values * factors


def _draws_factors(values: torch.Tensor, p: float) -> bool:
    """Returns whether torch's dropout would save factors. On CUDA its own kernel saves booleans instead."""
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
    """Returns the elements of the largest tensor that is no parameter, also in lists (one level)."""
    largest = 0
    for argument in arguments:
        for value in argument if isinstance(argument, list | tuple) else (argument,):
            if isinstance(value, torch.Tensor) and not isinstance(value, torch.nn.Parameter):
                largest = max(largest, value.numel())
    return largest
