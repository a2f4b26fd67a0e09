"""Random-k: sends a random subset of elements, the same on all ranks, so the values can be all-reduced."""

from __future__ import annotations

import math

import numpy as np
import torch

from ringspark.estimators.collectives.base import Collective
from ringspark.extras.compressors.base import Compressor, Sent


class RandomKCompressor(Compressor):
    """Sends a random share of the numbers, from the same positions on all ranks (Stich et al. 2018).

    Without error feedback, values are divided by the share, which makes them unbiased.
    """

    def sum(self, vector: torch.Tensor, collective: Collective, step: int) -> Sent:
        count = math.ceil(self.options.ratio * len(vector))
        random = np.random.Generator(np.random.PCG64([self.seed % 2**64, step]))
        drawn = np.sort(random.choice(len(vector), count, replace=False, shuffle=False))
        places = torch.from_numpy(drawn).to(vector.device)
        factor = 1.0 if self.options.feedback else len(vector) / count
        values = vector[places] * factor
        total = torch.zeros_like(vector)
        total[places] = collective.all_reduce(values)
        error = vector.clone()
        error[places] -= values
        return Sent(total, error)
