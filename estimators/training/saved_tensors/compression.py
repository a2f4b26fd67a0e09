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
from typing import Any, Protocol

import torch
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode

from ringspark.estimators.training.saved_tensors.bits import pack_bits, unpack_bits
from ringspark.estimators.training.saved_tensors.blocks import BlockFormat, dequantise, quantise

Parts = tuple[torch.Tensor, ...]


class Codec(Protocol):
    """Encodes vectors to stored parts and decodes them. Equal codecs give equal parts and equal keys."""

    def encode(self, values: torch.Tensor) -> Parts: ...

    def decode(self, parts: Parts, count: int, dtype: torch.dtype) -> torch.Tensor: ...


@dataclass(frozen=True)
class Raw:
    """Stores a vector unchanged."""

    def encode(self, values: torch.Tensor) -> Parts:
        return (values,)

    def decode(self, parts: Parts, count: int, dtype: torch.dtype) -> torch.Tensor:
        return parts[0]


@dataclass(frozen=True)
class Booleans:
    """Stores a mask exactly, one bit per value."""

    def encode(self, values: torch.Tensor) -> Parts:
        return (pack_bits(values),)

    def decode(self, parts: Parts, count: int, dtype: torch.dtype) -> torch.Tensor:
        return unpack_bits(parts[0], count)


@dataclass(frozen=True)
class Signs:
    """Stores where a gradient passes ReLU. It passes at a NaN, as in torch's own backward."""

    def encode(self, values: torch.Tensor) -> Parts:
        return (pack_bits(values.le(0).logical_not_()),)

    def decode(self, parts: Parts, count: int, dtype: torch.dtype) -> torch.Tensor:
        return unpack_bits(parts[0], count).to(dtype)


@dataclass(frozen=True)
class DropoutFactors:
    """Stores which of dropout's factors are 0; the others are 1 / `kept`, divided again in `dtype`."""

    kept: float

    def encode(self, values: torch.Tensor) -> Parts:
        return (pack_bits(values.ne(0)),)

    def decode(self, parts: Parts, count: int, dtype: torch.dtype) -> torch.Tensor:
        return unpack_bits(parts[0], count).to(dtype).div_(self.kept)


@dataclass(frozen=True)
class Blocks:
    """Stores eight bits per value: see `blocks`."""

    block_format: BlockFormat

    def encode(self, values: torch.Tensor) -> Parts:
        return quantise(values, self.block_format)

    def decode(self, parts: Parts, count: int, dtype: torch.dtype) -> torch.Tensor:
        codes, scales = parts
        return dequantise(codes, scales, self.block_format, dtype)


LOSSY: dict[str, Codec] = {"int8": Blocks("int8"), "fp8": Blocks("fp8")}


class SavedBy(Protocol):
    """The hooks, as the mode sees them while an operation runs."""

    def saving(self, codec: Codec | None, largest: int) -> AbstractContextManager[None]:
        """Sets the codec of saved tensors, if known, and the number of elements of the largest activation."""
        ...


class ForwardMode(TorchFunctionMode):
    """Watches one forward pass and tells the hooks which operation runs."""

    def __init__(self, hooks: SavedBy) -> None:
        super().__init__()
        self._hooks = hooks

    def __torch_function__(
        self, func: Callable[..., Any], types: object, args: Any = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        if func in _RELU:
            with self._hooks.saving(Signs(), 0):
                return func(*args, **kwargs)
        if func in _DROPOUT:
            call = _DROPOUT[func](*args, **kwargs)
            if call.draws_factors():
                return self._drop(call)
        with self._hooks.saving(None, _largest((*args, *kwargs.values()))):
            return func(*args, **kwargs)

    def _drop(self, call: _DropoutCall) -> torch.Tensor:
        """Repeats `at::dropout` step by step, with the same random numbers, arithmetic and node."""
        kept = 1 - call.p
        factors = torch.empty_like(call.values).bernoulli_(kept).div_(kept)
        with self._hooks.saving(DropoutFactors(kept), 0):
            return call.values.mul_(factors) if call.inplace else call.values * factors


@dataclass(frozen=True)
class _DropoutCall:
    values: torch.Tensor
    p: float
    inplace: bool

    def draws_factors(self) -> bool:
        """Returns whether torch would save factors. On CUDA its own kernel saves booleans instead."""
        return (
            torch.is_grad_enabled()
            and self.values.requires_grad
            and 0 < self.p < 1
            and self.values.numel() > 0
            and self.values.device.type in ("cpu", "meta")
        )


def _functional_dropout(
    input: torch.Tensor, p: float = 0.5, training: bool = True, inplace: bool = False
) -> _DropoutCall:
    return _DropoutCall(input, p if training else 0.0, inplace)


def _torch_dropout(input: torch.Tensor, p: float, train: bool) -> _DropoutCall:
    return _DropoutCall(input, p if train else 0.0, inplace=False)


def _torch_dropout_(input: torch.Tensor, p: float, train: bool) -> _DropoutCall:
    return _DropoutCall(input, p if train else 0.0, inplace=True)


_RELU = {F.relu, torch.relu, torch.relu_, torch.Tensor.relu, torch.Tensor.relu_}
_DROPOUT: dict[Callable[..., Any], Callable[..., _DropoutCall]] = {
    F.dropout: _functional_dropout,
    torch.dropout: _torch_dropout,
    torch.dropout_: _torch_dropout_,
}


def _largest(arguments: Iterable[Any]) -> int:
    """Returns the elements of the largest tensor that is no parameter, also in lists (one level)."""
    largest = 0
    for argument in arguments:
        for value in argument if isinstance(argument, list | tuple) else (argument,):
            if isinstance(value, torch.Tensor) and not isinstance(value, torch.nn.Parameter):
                largest = max(largest, value.numel())
    return largest
