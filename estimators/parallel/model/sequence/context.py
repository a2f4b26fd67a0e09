"""Base class of the ways to attend across ranks."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Any, ClassVar

import torch

from ringspark.estimators.collectives import Collective
from ringspark.estimators.parallel.model.sequence.spans import Spans


class Context(ABC):
    """Replaces `whole_rows.attend` in every attention of a network. Runs on every rank.

    Attributes:
        takes_dropout: Whether it supports dropout of attention weights. No kernel repeats the same dropout if
            the weights are recomputed in the backward pass, from keys of several ranks.
        balances: Whether each rank must have tokens from both ends of a row to balance causal attention.
    """

    takes_dropout: ClassVar[bool] = False
    balances: ClassVar[bool] = True

    def __init__(self, collective: Collective, spans: Spans) -> None:
        self.collective, self.spans = collective, spans

    def __deepcopy__(self, memo: dict[int, Any]) -> Context:
        # A copied network belongs to the same rank.
        return self

    def __call__(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        mask: torch.Tensor | None,
        dropout: float,
        causal: bool,
    ) -> torch.Tensor:
        """Returns the attention output, (batch, heads, own tokens, head_dim).

        Args:
            query, key, value: (batch, heads, own tokens, head_dim).
            mask: (batch, 1, 1, seq) booleans about all tokens, as `SpreadRows.mask` returns them.
        """
        assert mask is not None  # its shape has the number of tokens
        assert self.takes_dropout or dropout == 0
        seq = mask.shape[-1]
        return self.attend(query, key, value, mask if len(mask) else None, seq, dropout, causal)

    @abstractmethod
    def attend(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        mask: torch.Tensor | None,
        seq: int,
        dropout: float,
        causal: bool,
    ) -> torch.Tensor:
        """Like `__call__`; `mask` is None if all tokens count, `seq` is the number of all tokens."""
