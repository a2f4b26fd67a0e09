"""Replaces operators of torch that other runtimes lack."""

from __future__ import annotations

from collections.abc import Sequence
from functools import reduce

import torch

from ringspark.models.process_state import PROCESS_LOCK, silence_thread

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


def replace_rare_operators(program: torch.export.ExportedProgram) -> torch.export.ExportedProgram:
    """Replaces `erfinv`, with which networks for tables encode numbers."""
    with PROCESS_LOCK, torch.no_grad(), silence_thread():
        # Decomposes only the operators in this dict.
        found: torch.export.ExportedProgram = program.run_decompositions(
            {torch.ops.aten.erfinv.default: _erfinv}
        )
        return found


def _erfinv(x: torch.Tensor) -> torch.Tensor:
    w = -torch.log((1 - x) * (1 + x))
    middle = _polynomial(_MIDDLE, w - 2.5)
    tails = _polynomial(_TAILS, w.clamp(min=5.0).sqrt() - 3)
    return torch.where(w < 5, middle, tails) * x


def _polynomial(factors: Sequence[float], w: torch.Tensor) -> torch.Tensor:
    return reduce(lambda result, factor: result * w + factor, factors[1:], torch.full_like(w, factors[0]))
