"""Operators of torch that ONNX lacks, written with operators that it has."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

# Giles, "Approximating the erfinv function" (GPU Computing Gems, 2010): fp32 coefficients for the middle and
# for the tails, highest power first. The relative error is below 3e-7.
_MIDDLE = (
    *(2.81022636e-08, 3.43273939e-07, -3.5233877e-06, -4.39150654e-06, 0.00021858087),
    *(-0.00125372503, -0.00417768164, 0.246640727, 1.50140941),
)
_TAILS = (
    *(-0.000200214257, 0.000100950558, 0.00134934322, -0.00367342844, 0.00573950773),
    *(-0.0076224613, 0.00943887047, 1.00167406, 2.83297682),
)


def translations() -> dict[Any, Callable[..., Any]]:
    """Returns the table `custom_translation_table` of `torch.onnx.export`."""
    return {torch.ops.aten.erfinv.default: _erfinv}


def _erfinv(x: Any) -> Any:
    """Tables encode numbers with this function, as quantiles of the normal distribution."""
    from onnxscript import opset18 as op

    def number(value: float) -> Any:
        return op.Constant(value_float=value)

    def polynomial(factors: Sequence[float], w: Any) -> Any:
        result = number(factors[0])
        for factor in factors[1:]:
            result = op.Add(op.Mul(result, w), number(factor))
        return result

    one, limit = number(1.0), number(5.0)
    w = op.Neg(op.Log(op.Mul(op.Sub(one, x), op.Add(one, x))))
    middle = polynomial(_MIDDLE, op.Sub(w, number(2.5)))
    tails = polynomial(_TAILS, op.Sub(op.Sqrt(op.Max(w, limit)), number(3.0)))
    return op.Mul(op.Where(op.Less(w, limit), middle, tails), x)
