"""A fake collective for one rank without peers, which works on tensors without values.

The planner runs a rank's shard of a network with it, and counts its messages and bytes.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch

from ringspark.estimators.collectives.base import ReduceOp, num_bytes


class Message(NamedTuple):
    """One collective operation.

    Attributes:
        kind: "all_reduce", "all_gather", "reduce_scatter", "all_to_all", or "shift" to one other rank.
        num_bytes: Bytes of the whole tensor, or of all ranks together; for a shift, bytes that one rank
            sends.
    """

    kind: str
    num_bytes: int


class FakeCollective:
    """Returns tensors with the shapes and dtypes of the real results, and records each operation."""

    name = "fake"
    belongs_to_rank = True

    def __init__(self, rank: int, size: int) -> None:
        self.rank, self.size = rank, size
        self.messages: list[Message] = []

    def all_reduce(self, tensor: torch.Tensor, op: ReduceOp = "sum") -> torch.Tensor:
        self._record("all_reduce", num_bytes([tensor]))
        return tensor.detach().clone(memory_format=torch.contiguous_format)

    def all_gather(self, tensor: torch.Tensor, counts: Sequence[int]) -> list[torch.Tensor]:
        self._record("all_gather", sum(counts) * tensor.element_size())
        return [tensor.new_empty(count) for count in counts]

    def start_reduce_scatter(self, tensor: torch.Tensor, counts: Sequence[int]) -> Callable[[], torch.Tensor]:
        self._record("reduce_scatter", num_bytes([tensor]))
        return lambda: tensor.new_empty(counts[self.rank])

    def all_to_all(self, pieces: Sequence[torch.Tensor], counts: Sequence[int]) -> list[torch.Tensor]:
        if sum(bool(piece.numel()) for piece in pieces) == 1:
            self._record("shift", num_bytes(pieces))
        else:
            self._record("all_to_all", self.size * num_bytes(pieces))
        return [pieces[0].new_empty(count) for count in counts]

    def _record(self, kind: str, count: int) -> None:
        self.messages.append(Message(kind, count))
