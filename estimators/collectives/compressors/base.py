"""The interface of a compressor: it sums the ranks' gradients in fewer bytes, and says what is left behind.

Invariant: every rank gets the same `total`, to the bit, and the ranks' `error`s add up to what the total
lacks: total + sum of errors = sum of inputs, up to the rounding of the additions. With error feedback an
error is added to the next step's gradient, so nothing is lost for good (Stich et al. 2018; Karimireddy et
al. 2019).
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar, NamedTuple

import torch

from ringspark.estimators.collectives.base import Collective
from ringspark.estimators.options.compression import Compression


class Sent(NamedTuple):
    """What a compressed exchange gives a rank.

    Attributes:
        total: The sum over the ranks, as it arrived; (elements,), equal on all ranks.
        error: What of this rank's input is not in the total; (elements,). None where no feedback wants it.
    """

    total: torch.Tensor
    error: torch.Tensor | None


class Compressor(ABC):
    """Sums vectors over the ranks in fewer bytes. Every method runs on every rank.

    A vector holds several tensors end to end. All ranks make a compressor from the same shapes, options and
    seed, and give vectors without inf or NaN.

    Attributes:
        unbiased: Whether the mean of the total over the random choices is the sum of the inputs, where there
            is no feedback.
    """

    unbiased: ClassVar[bool] = False

    def __init__(self, shapes: Sequence[torch.Size], seed: int, options: Compression) -> None:
        self.shapes = [torch.Size(shape) for shape in shapes]
        self.sizes = [shape.numel() for shape in self.shapes]
        self.seed = seed
        self.options: Any = options
        self.has_feedback = options.feedback

    @classmethod
    def helps(cls, shape: torch.Size, options: Any) -> bool:
        """Whether a tensor of that shape takes fewer bytes compressed; others travel whole."""
        return True

    @abstractmethod
    def sum(self, vector: torch.Tensor, collective: Collective, step: int) -> Sent:
        """Sums the ranks' vectors.

        Args:
            vector: The tensors end to end, (elements,); it is not changed.
            step: Number of the optimizer step, from which random choices follow.
        """

    def state(self) -> dict[str, torch.Tensor]:
        """Returns what the next sum depends on beside its inputs; equal on all ranks."""
        return {}

    def load(self, state: Mapping[str, torch.Tensor]) -> None:
        """Restores the result of `state`; an empty one is that of the beginning."""
        return

    def _pieces(self, vector: torch.Tensor) -> list[torch.Tensor]:
        """Returns views of the vector's tensors, each of one dimension."""
        return list(torch.split(vector, self.sizes))


def generator_for(vector: torch.Tensor, *numbers: int) -> torch.Generator:
    """Returns random numbers that follow from whole numbers alone, so that a resumed run draws the same."""
    mixed = 0x9E3779B97F4A7C15
    for number in numbers:
        # The finalizer of SplitMix64, so that neighbouring numbers give unlike seeds.
        mixed = (mixed ^ (number % 2**64)) * 0xBF58476D1CE4E5B9 % 2**64
        mixed = (mixed ^ (mixed >> 27)) * 0x94D049BB133111EB % 2**64
        mixed ^= mixed >> 31
    return torch.Generator(device=vector.device).manual_seed(mixed % 2**63)
