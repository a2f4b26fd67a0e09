"""Sufficient factors: gradients of wide layers as products of thin matrices (Xie et al. 2014; Poseidon 2017).

The gradient of a linear layer is a sum of outer products, one per row, so its rank is at most the number of
rows. For its gradient M (a, b), every rank sends two factors: Q (a, r), whose orthonormal columns span the
columns of M, and Q^T M (r, b). If the rank of M is at most r, their product Q Q^T M equals M, up to rounding.
"""

from __future__ import annotations

import torch

from ringspark.estimators.collectives.base import Collective
from ringspark.estimators.options.compression import SufficientFactors
from ringspark.extras.compressors.base import Compressor, Sent, generator_for


class SufficientFactorCompressor(Compressor):
    """Gathers the two factors of every rank's gradient. Error feedback keeps the error if r is too small."""

    @classmethod
    def helps(cls, shape: torch.Size, options: SufficientFactors) -> bool:
        return super().helps(shape, options) and options.rows * (shape[0] + shape[1:].numel()) < shape.numel()

    def sum(self, vector: torch.Tensor, collective: Collective, step: int) -> Sent:
        random = generator_for(vector, self.seed, step)
        pairs, error = [], []
        for piece, shape in zip(self._split(vector), self.shapes, strict=True):
            matrix = piece.view(shape[0], -1)
            rank = min(self.options.rows, *matrix.shape)
            drawn = torch.randn(
                matrix.shape[1], rank, generator=random, dtype=vector.dtype, device=vector.device
            )
            # Products of a matrix of this rank with random vectors span its columns (Halko et al. 2011).
            basis = torch.linalg.qr(matrix @ drawn).Q
            pairs.append((basis, basis.T @ matrix))
            error.append((matrix - basis @ pairs[-1][1]).view(-1))
        sent = torch.cat([factor.reshape(-1) for pair in pairs for factor in pair])
        total = torch.zeros_like(vector)
        for gathered in collective.all_gather(sent, [len(sent)] * collective.size):
            factors = iter(torch.split(gathered, [factor.numel() for pair in pairs for factor in pair]))
            for piece, (basis, coefficients) in zip(self._split(total), pairs, strict=True):
                left, right = next(factors).view_as(basis), next(factors).view_as(coefficients)
                piece.view(len(left), -1).addmm_(left, right)
        return Sent(total, torch.cat(error))
