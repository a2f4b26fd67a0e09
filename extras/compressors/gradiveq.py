"""GradiVeQ: all-reduces only some principal components of the gradients (Yu et al. 2018).

Slices of one tensor's gradient are correlated. In a few sampling steps, gradients are all-reduced
uncompressed, which shows the directions along which the slices vary most. In the following steps, only the
components along these directions are all-reduced.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch

from ringspark.estimators.collectives.base import Collective
from ringspark.estimators.options.compression import GradiVeQ
from ringspark.extras.compressors.base import Compressor, Sent
from ringspark.extras.compressors.packing import in_buckets


class GradiVeQCompressor(Compressor):
    """Sends `components` numbers per slice of a gradient; sends whole slices in the sampling steps.

    The sampling steps determine the directions of the components. Rank 0 broadcasts the directions, because
    the ranks' processors may round differently.
    """

    def __init__(self, shapes: list[torch.Size], seed: int, options: GradiVeQ) -> None:
        super().__init__(shapes, seed, options)
        self._done = 0  # steps of this period
        self._spread: list[torch.Tensor] = []  # sums of outer products of slices, (slice, slice)
        self._bases: list[torch.Tensor] = []  # directions, (slice, components)

    @classmethod
    def helps(cls, shape: torch.Size, options: GradiVeQ) -> bool:
        return super().helps(shape, options) and options.components < options.slice <= shape.numel()

    def sum(self, vector: torch.Tensor, collective: Collective, step: int) -> Sent:
        samples = self.options.samples
        if self._done < samples:
            sent = self._sample(vector, collective)
        else:
            sent = self._compress(vector, collective)
        self._done = (self._done + 1) % (samples + self.options.refresh)
        return sent

    def _sample(self, vector: torch.Tensor, collective: Collective) -> Sent:
        total = collective.all_reduce(vector)
        slices = [in_buckets(piece, self.options.slice) for piece in self._split(total)]
        spread = [one.T @ one for one in slices]
        self._spread = [a + b for a, b in zip(self._spread, spread, strict=True)] if self._done else spread
        if self._done + 1 == self.options.samples:
            # The eigenvectors come in the order of their values, ascending.
            kept = self.options.components
            self._bases = [torch.linalg.eigh(s).eigenvectors[:, -kept:].contiguous() for s in self._spread]
            collective.broadcast(self._bases)
            self._spread = []
        return Sent(total, torch.zeros_like(vector))

    def _compress(self, vector: torch.Tensor, collective: Collective) -> Sent:
        codes = [
            in_buckets(piece, self.options.slice) @ basis
            for piece, basis in zip(self._split(vector), self._bases, strict=True)
        ]
        own = torch.cat([code.view(-1) for code in codes])
        summed = collective.all_reduce(own)
        return Sent(self._decode(summed, codes), vector - self._decode(own, codes))

    def _decode(self, joined: torch.Tensor, like: list[torch.Tensor]) -> torch.Tensor:
        codes = [
            part.view(c.shape)
            for part, c in zip(torch.split(joined, [c.numel() for c in like]), like, strict=True)
        ]
        pieces = zip(codes, self._bases, self.sizes, strict=True)
        return torch.cat([(code @ basis.T).view(-1)[:size] for code, basis, size in pieces])

    def state(self) -> dict[str, torch.Tensor]:
        bases = {f"basis.{number}": basis for number, basis in enumerate(self._bases)}
        spread = {f"spread.{number}": matrix for number, matrix in enumerate(self._spread)}
        return {"done": torch.tensor([self._done]), **bases, **spread}

    def load(self, state: Mapping[str, torch.Tensor]) -> None:
        def of(kind: str) -> list[torch.Tensor]:
            count = sum(key.startswith(f"{kind}.") for key in state)
            return [state[f"{kind}.{number}"].clone() for number in range(count)]

        self._done = int(state["done"]) if state else 0
        self._bases, self._spread = of("basis"), of("spread")
