"""A collective for one rank of an axis whose other ranks are not there: shapes without numbers.

Whoever plans a training runs a rank's part of a network on tensors without numbers. The exchanges inside it
return what has the shape and dtype of the real result, and are noted: so their number and bytes are counted
from the code that will exchange.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch

from ringspark.estimators.collectives.base import ReduceOp, num_bytes


class Message(NamedTuple):
    """One exchange of all ranks of an axis.

    Attributes:
        kind: "all_reduce", "all_gather", "reduce_scatter", "all_to_all", or "shift": to one other rank.
        num_bytes: Bytes of the whole: what is summed, or what all ranks have together; of a shift, what one
            rank sends.
    """

    kind: str
    num_bytes: int


class StandIn:
    """The collective of the rank at one place of an axis.

    Attributes:
        messages: Exchanges since they were last cleared.
    """

    name = "stand-in"

    def __init__(self, rank: int, size: int) -> None:
        self.rank, self.size = rank, size
        self.messages: list[Message] = []

    def __deepcopy__(self, memo: dict[int, Any]) -> StandIn:
        # A copy of a network exchanges with the same ranks.
        return self

    def all_reduce(self, tensor: torch.Tensor, op: ReduceOp = "sum") -> torch.Tensor:
        self._note("all_reduce", num_bytes([tensor]))
        return tensor.detach().clone(memory_format=torch.contiguous_format)

    def start_sum(self, tensor: torch.Tensor, name: str) -> Callable[[], None]:
        self._note("all_reduce", num_bytes([tensor]))
        return lambda: None

    def all_gather(self, tensor: torch.Tensor, counts: Sequence[int] | None = None) -> list[torch.Tensor]:
        counts = [len(tensor)] * self.size if counts is None else counts
        self._note("all_gather", sum(counts) * tensor.element_size())
        return [tensor.new_empty(count) for count in counts]

    def start_reduce_scatter(self, tensor: torch.Tensor, counts: Sequence[int]) -> Callable[[], torch.Tensor]:
        self._note("reduce_scatter", num_bytes([tensor]))
        return lambda: tensor.new_empty(counts[self.rank])

    def all_to_all(self, pieces: Sequence[torch.Tensor], counts: Sequence[int]) -> list[torch.Tensor]:
        if sum(bool(piece.numel()) for piece in pieces) == 1:
            self._note("shift", num_bytes(pieces))
        else:
            self._note("all_to_all", self.size * num_bytes(pieces))
        return [pieces[0].new_empty(count) for count in counts]

    def _note(self, kind: str, count: int) -> None:
        self.messages.append(Message(kind, count))
