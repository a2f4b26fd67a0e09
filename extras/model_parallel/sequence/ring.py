"""Ring attention (Liu, Zaharia and Abbeel 2023): keys and values travel around the ranks.

The backward pass sends them around again, together with their gradients, until each rank has its own back.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from ringspark.estimators.collectives import Collective
from ringspark.extras.model_parallel.sequence.context import SpanContext
from ringspark.extras.model_parallel.sequence.span_attention import SpanAttention, SpanGradients


class Ring(SpanContext):
    def add_keys(
        self, attention: SpanAttention, key: torch.Tensor, value: torch.Tensor, seq: int
    ) -> Sequence[torch.Tensor]:
        here, lengths = torch.stack([key, value]), self.spans.lengths(seq)
        for step in range(self.collective.size):
            attention.add(here[0], here[1], self.spans.of(self._source(step), seq))
            if step + 1 < self.collective.size:
                (here,) = shift([here], 3, lengths[self._source(step + 1)], self.collective)
        # Not `here`: these two are views of one tensor, which is kept anyway.
        return [key, value]

    def add_gradients(
        self, gradients: SpanGradients, saved: Sequence[torch.Tensor], seq: int
    ) -> torch.Tensor:
        here, lengths = torch.stack(list(saved)), self.spans.lengths(seq)
        found = torch.zeros_like(here, dtype=gradients.query.dtype)
        for step in range(self.collective.size):
            gradients.add(here[0], here[1], self.spans.of(self._source(step), seq), found)
            length = lengths[self._source(step + 1)]
            if step + 1 < self.collective.size:
                here, found = shift([here, found], 3, length, self.collective)
            else:
                (found,) = shift([found], 3, length, self.collective)
        return found

    def _source(self, step: int) -> int:
        """Returns the rank whose keys are here after `step` messages."""
        return (self.collective.rank - step) % self.collective.size


def shift(
    tensors: Sequence[torch.Tensor], dim: int, length: int, collective: Collective
) -> list[torch.Tensor]:
    """Sends tensors to the next rank; returns the tensors of the previous rank, of `length` along `dim`."""
    shapes = [(*x.shape[:dim], length, *x.shape[dim + 1 :]) for x in tensors]
    sizes = [torch.Size(s).numel() * x.element_size() for s, x in zip(shapes, tensors, strict=True)]
    # As bytes, because dtypes may differ. All have equally many elements, so wide dtypes stay aligned.
    sent = torch.cat([x.contiguous().view(-1).view(torch.uint8) for x in tensors])
    rank, size = collective.rank, collective.size
    pieces, counts = [sent[:0]] * size, [0] * size
    pieces[(rank + 1) % size], counts[(rank - 1) % size] = sent, sum(sizes)
    came = collective.all_to_all(pieces, counts)[(rank - 1) % size]
    return [
        part.view(x.dtype).view(shape)
        for part, x, shape in zip(torch.split(came, sizes), tensors, shapes, strict=True)
    ]
