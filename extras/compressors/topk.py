"""Top-k: sends the largest elements of the vector (Aji and Heafield 2017; Lin et al. 2018)."""

from __future__ import annotations

import math

import torch

from ringspark.estimators.collectives.base import Collective
from ringspark.extras.compressors.base import Compressor, Sent
from ringspark.extras.compressors.sparse import all_reduce_sparse


class TopKCompressor(Compressor):
    """Sends the largest elements, each with its index: 6 bytes per element."""

    def sum(self, vector: torch.Tensor, collective: Collective, step: int) -> Sent:
        count = math.ceil(self.options.ratio * len(vector))
        places = torch.topk(vector.abs(), count, sorted=False).indices.sort().values
        return all_reduce_sparse(vector, places, vector[places], collective, is_equal=True)
