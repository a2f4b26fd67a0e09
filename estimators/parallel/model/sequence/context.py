"""What the ways to attend across ranks have in common."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Any, ClassVar

import torch

from ringspark.estimators.collectives import Collective
from ringspark.estimators.parallel.model.sequence.spans import Spans


class Context(ABC):
    """Takes the place of `whole_rows.attend` in every attention of a network. Runs on every rank.

    Attributes:
        takes_dropout: Whether attention weights may be dropped. Where the weights of one query are computed
            in parts, and anew in the backward pass, on other ranks' keys, no kernel draws them alike twice.
        balances: Whether causal attention is even only if each rank has tokens from both ends of a row.
    """

    takes_dropout: ClassVar[bool] = False
    balances: ClassVar[bool] = True

    def __init__(self, collective: Collective, spans: Spans) -> None:
        self.collective, self.spans = collective, spans

    def __deepcopy__(self, memo: dict[int, Any]) -> Context:
        # A copy of a network stays in its gang.
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
        """Returns each query's mean of the values, (batch, heads, own tokens, head_dim).

        Args:
            query, key, value: (batch, heads, own tokens, head_dim).
            mask: (batch, 1, 1, seq) booleans about all tokens, as `SpreadRows.mask` returns them.
        """
        assert mask is not None  # it tells the number of tokens
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
        """Like a call; `mask` is None if all tokens count, `seq` is the number of all tokens."""
