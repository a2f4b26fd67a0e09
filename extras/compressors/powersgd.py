"""PowerSGD: low-rank approximations of gradients (Vogels et al. 2019).

One step of the power method: every rank multiplies its gradient M (a, b) by Q (b, r), the sum P of the
products is orthonormalized, and the sum of M^T P gives the new Q. Q is kept for the next step.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from ringspark.estimators.collectives.base import Collective, all_reduce_together
from ringspark.estimators.options.compression import PowerSGD
from ringspark.extras.compressors.base import Compressor, Sent, generator_for


class PowerSgdCompressor(Compressor):
    """Approximates each matrix by P Q^T of rank r. A tensor's dimensions after the first become columns."""

    def __init__(self, shapes: list[torch.Size], seed: int, options: PowerSGD) -> None:
        super().__init__(shapes, seed, options)
        self._rank: int = options.rank
        self._bases: list[torch.Tensor] = []

    @classmethod
    def helps(cls, shape: torch.Size, options: PowerSGD) -> bool:
        return super().helps(shape, options) and options.rank * (shape[0] + shape[1:].numel()) < shape.numel()

    def sum(self, vector: torch.Tensor, collective: Collective, step: int) -> Sent:
        matrices = [
            piece.view(shape[0], -1) for piece, shape in zip(self._split(vector), self.shapes, strict=True)
        ]
        fresh = self._make_bases(matrices, step)
        if not self._bases:
            self._bases = fresh
        for basis, drawn in zip(self._bases, fresh, strict=True):
            # A gradient of zeros leaves directions of zeros, which never recover, and products that
            # overflowed leave directions that spoil all later steps.
            largest = basis.abs().amax(0)
            is_lost = (largest == 0) | ~largest.isfinite()
            basis[:, is_lost] = drawn[:, is_lost]
        left = all_reduce_together(
            [m @ basis for m, basis in zip(matrices, self._bases, strict=True)], collective
        )
        # Householder's method returns the identity for a matrix of zeros; other methods divide by 0.
        left = [torch.linalg.qr(product).Q for product in left]
        own = [m.T @ p for m, p in zip(matrices, left, strict=True)]
        self._bases = all_reduce_together(own, collective)
        pairs = zip(left, self._bases, strict=True)
        total = torch.cat([(p @ q.T).view(-1) for p, q in pairs])
        error = vector - torch.cat([(p @ q.T).view(-1) for p, q in zip(left, own, strict=True)])
        return Sent(total, error)

    def _make_bases(self, matrices: list[torch.Tensor], step: int) -> list[torch.Tensor]:
        random = generator_for(matrices[0], self.seed, step)
        options: dict[str, Any] = {"dtype": matrices[0].dtype, "device": matrices[0].device}
        # The rank of a matrix is at most its shorter side.
        ranks = [min(self._rank, *m.shape) for m in matrices]
        return [
            torch.randn(m.shape[1], rank, generator=random, **options)
            for m, rank in zip(matrices, ranks, strict=True)
        ]

    def state(self) -> dict[str, torch.Tensor]:
        return {f"basis.{number}": basis for number, basis in enumerate(self._bases)}

    def load(self, state: Mapping[str, torch.Tensor]) -> None:
        self._bases = [state[f"basis.{number}"].clone() for number in range(len(state))]
