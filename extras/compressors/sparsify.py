"""Random sparsification: sends a number with a probability that grows with its magnitude.

Wangni et al. 2018, "Gradient Sparsification for Communication-Efficient Distributed Optimization".
"""

from __future__ import annotations

import torch

from ringspark.estimators.collectives.base import Collective
from ringspark.extras.compressors.base import Compressor, Sent, generator_for
from ringspark.extras.compressors.sparse import all_reduce_sparse

# Rounds of the paper's greedy algorithm, after which the expected share is right to a few percent.
_ROUNDS = 4


class SparsifyCompressor(Compressor):
    """Sends a number g as g / p with probability p = min(1, c |g|): unbiased, with the least variance.

    `ratio`, the share of numbers to send, determines c. With error feedback the compressor sends g itself,
    because the residual of g / p may be larger than g, so the residuals would grow without bound.
    """

    def sum(self, vector: torch.Tensor, collective: Collective, step: int) -> Sent:
        random = generator_for(vector, self.seed, step, collective.rank)
        chances = chances_for(vector, self.options.ratio)
        drawn = torch.rand(vector.shape, generator=random, dtype=vector.dtype, device=vector.device)
        places = torch.nonzero(drawn < chances).view(-1)
        values = vector[places] if self.has_feedback else vector[places] / chances[places]
        return all_reduce_sparse(vector, places, values, collective, is_equal=False)


def chances_for(vector: torch.Tensor, share: float) -> torch.Tensor:
    """Returns each number's probability to be sent, 0 for zeros; the mean is about `share`."""
    sizes = vector.abs()
    largest = sizes.max()
    if not bool(largest > 0):
        return sizes
    # Scaled to at most 1, because a sum of tiny numbers would vanish.
    sizes = sizes / largest
    if share == 1:
        return (sizes > 0).to(sizes.dtype)
    wanted = share * len(vector)
    chances = (sizes * (wanted / sizes.sum())).clamp_(max=1)
    for _ in range(_ROUNDS):
        is_sure = chances >= 1
        others = chances.masked_fill(is_sure, 0).sum()
        left = wanted - is_sure.sum()
        if not bool(others > 0) or not bool(left > others):
            break
        chances = (chances * (left / others)).clamp_(max=1)
    return chances
