"""The largest numbers of the whole vector, the rest later (Aji and Heafield 2017; Lin et al. 2018)."""

from __future__ import annotations

import math

import torch

from ringspark.estimators.collectives.base import Collective
from ringspark.estimators.collectives.compressors.base import Compressor, Sent
from ringspark.estimators.collectives.compressors.picked import sum_of_picked


class TopKCompressor(Compressor):
    """The share of numbers that are largest in size, each with its place: 6 bytes.

    Every rank gets what every other picked, so a rank sends N - 1 times its own: for few ranks.
    """

    def sum(self, vector: torch.Tensor, collective: Collective, step: int) -> Sent:
        count = math.ceil(self.options.ratio * len(vector))
        places = torch.topk(vector.abs(), count, sorted=False).indices.sort().values
        return sum_of_picked(vector, places, vector[places], collective, is_equal=True)
