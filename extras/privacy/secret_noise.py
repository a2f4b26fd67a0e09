"""Random numbers that nobody can repeat: they come from the operating system, and nothing stores a seed.

Whoever knows the noise can subtract it, so the noise must not follow from `seed`, a checkpoint or a log.
"""

from __future__ import annotations

import secrets
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import numpy as np
import torch

_SEED_BITS = 256
# Sum of this many normal numbers: without it, the low digits of floating-point noise can give away the value
# below the noise (Holohan and Braghin 2021, "Secure Random Sampling in Differential Privacy").
_SUMMED = 4


def secret_generator() -> np.random.Generator:
    """Returns a generator with a new seed of the operating system."""
    return np.random.Generator(np.random.PCG64DXSM(secrets.randbits(_SEED_BITS)))


def normal_noise(shape: Sequence[int], deviation: float, generator: np.random.Generator) -> torch.Tensor:
    """Returns normal noise in float64, on the CPU."""
    total = generator.standard_normal(tuple(shape))
    for _ in range(_SUMMED - 1):
        total += generator.standard_normal(tuple(shape))
    return torch.from_numpy(np.asarray(total * (deviation / _SUMMED**0.5)))


@contextmanager
def secret_dropout(device: torch.device) -> Iterator[None]:
    """Gives torch's generators secret seeds inside the context, and restores them.

    The position of a row in the batch decides its dropout mask. With a known seed, one row more would
    visibly change the masks of the rows after it, and so the gradients of several rows.
    """
    gpus = [device] if device.type == "cuda" else []
    with torch.random.fork_rng(devices=gpus):
        torch.manual_seed(secrets.randbits(63))
        yield
