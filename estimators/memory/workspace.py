"""Estimates scratch memory inside operators that is as big as activations; no dispatch mode sees it.

A convolution on a CPU whose oneDNN does not compute in the given dtype (16 bits without AVX-512) unfolds
its input into columns: kernel size times the input. torch tells which backend it would choose.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch

_COLUMNS = ("Slow2d", "Slow3d")


def scratch_bytes(func: Any, args: tuple[Any, ...], result: Any) -> int:
    """Returns the bytes that `func` allocates besides its results and releases before it returns."""
    count = _SCRATCH.get(func)
    return count(args, result) if count is not None else 0


def _convolution(args: tuple[Any, ...], result: Any) -> int:
    values, weight, bias, stride, padding, dilation, transposed, output_padding, groups = args[:9]
    bias_sizes = list(bias.shape) if bias is not None else None
    options = (stride, padding, dilation, transposed, output_padding, groups, bias_sizes)
    return _columns(values, weight, bias, options, result.shape)


def _convolution_backward(args: tuple[Any, ...], result: Any) -> int:
    gradient, values, weight, bias_sizes, stride, padding, dilation, transposed, output_padding, groups = (
        args[:10]
    )
    options = (stride, padding, dilation, transposed, output_padding, groups, bias_sizes)
    return _columns(values, weight, None, options, gradient.shape)


def _columns(
    values: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, options: Any, output: torch.Size
) -> int:
    backend = torch._C._select_conv_backend(values, weight, bias, *options)
    kernel = weight.shape[2:]
    if backend.name not in _COLUMNS or math.prod(kernel) == 1:
        return 0
    # (rows, channels of a group * kernel, output positions); the groups run one after another.
    return values.shape[0] * math.prod(weight.shape[1:]) * math.prod(output[2:]) * values.element_size()


_SCRATCH: dict[Any, Callable[[tuple[Any, ...], Any], int]] = {
    torch.ops.aten.convolution.default: _convolution,
    torch.ops.aten.convolution_backward.default: _convolution_backward,
}
