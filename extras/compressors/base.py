"""The interface of gradient compressors, which all-reduce encoded gradients and return the coding error.

All ranks get bitwise the same total, and total + sum of the errors = sum of the inputs, up to rounding. With
error feedback each rank adds its error to its next gradient (Stich et al. 2018; Karimireddy et al. 2019).
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch

from ringspark.estimators.collectives.base import Collective
from ringspark.estimators.options.compression import Compression


class Sent(NamedTuple):
    """The result of a compressed all-reduce.

    Attributes:
        total: The sum over the ranks, (elements,); equal on all ranks.
        error: Part of this rank's input that is not in the total; None without error feedback.
    """

    total: torch.Tensor
    error: torch.Tensor | None


class Compressor(ABC):
    """All-reduces vectors, but sends fewer bytes. Every method runs on every rank.

    A vector is the concatenation of several flattened tensors, without inf and NaN.
    """

    def __init__(self, shapes: Sequence[torch.Size], seed: int, options: Compression) -> None:
        self.shapes = [torch.Size(shape) for shape in shapes]
        self.sizes = [shape.numel() for shape in self.shapes]
        self.seed = seed
        self.options: Any = options
        self.has_feedback = options.feedback

    @classmethod
    def helps(cls, shape: torch.Size, options: Any) -> bool:
        """Whether a tensor of this shape takes fewer bytes if compressed; if not, it is sent uncompressed."""
        return len(shape) > 1 and shape.numel() >= options.least

    @abstractmethod
    def sum(self, vector: torch.Tensor, collective: Collective, step: int) -> Sent:
        """Sums the ranks' vectors, (elements,); `step` seeds random numbers."""

    def state(self) -> dict[str, torch.Tensor]:
        """Returns the state that the next sum depends on; equal on all ranks."""
        return {}

    def load(self, state: Mapping[str, torch.Tensor]) -> None:
        """Restores a state that `state` returned; an empty mapping restores the initial state."""
        return

    def _split(self, vector: torch.Tensor) -> list[torch.Tensor]:
        return list(torch.split(vector, self.sizes))


def generator_for(vector: torch.Tensor, *numbers: int) -> torch.Generator:
    """Returns a random generator seeded by `numbers`, so that a resumed run draws the same random numbers."""
    mixed = 0x9E3779B97F4A7C15
    for number in numbers:
        # The finalizer of SplitMix64, so that neighbouring numbers give different seeds.
        mixed = (mixed ^ (number % 2**64)) * 0xBF58476D1CE4E5B9 % 2**64
        mixed = (mixed ^ (mixed >> 27)) * 0x94D049BB133111EB % 2**64
        mixed ^= mixed >> 31
    return torch.Generator(device=vector.device).manual_seed(mixed % 2**63)
