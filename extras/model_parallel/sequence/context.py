"""Base classes of the ways to attend across ranks."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any, ClassVar

import torch
from torch.autograd.function import once_differentiable

from ringspark.estimators.collectives import Collective
from ringspark.extras.model_parallel.sequence.span_attention import Queries, SpanAttention, SpanGradients
from ringspark.extras.model_parallel.sequence.spans import Spans


class Context(ABC):
    """Replaces `whole_rows.attend` in every attention of a network. Runs on every rank.

    Attributes:
        takes_dropout: Whether it supports dropout of attention weights. No kernel repeats the same dropout if
            the backward pass recomputes the attention weights from keys of several ranks.
        balances: Whether each rank must have tokens from both ends of a row to balance causal attention.
    """

    takes_dropout: ClassVar[bool] = False
    balances: ClassVar[bool] = True

    def __init__(self, collective: Collective, spans: Spans) -> None:
        self.collective, self.spans = collective, spans

    def __call__(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        mask: torch.Tensor | None,
        dropout: float,
        causal: bool,
    ) -> torch.Tensor:
        """Returns the attention output, (batch, heads, tokens of this rank, head_dim).

        `mask` is (batch, 1, 1, seq) booleans, False for keys to ignore; (0, 1, 1, seq) to ignore none.
        """
        assert mask is not None  # its shape has the number of tokens
        assert self.takes_dropout or dropout == 0
        return self.attend((query, key, value), mask if len(mask) else None, mask.shape[-1], dropout, causal)

    @abstractmethod
    def attend(
        self,
        inputs: tuple[torch.Tensor, torch.Tensor, torch.Tensor],
        mask: torch.Tensor | None,
        seq: int,
        dropout: float,
        causal: bool,
    ) -> torch.Tensor:
        """Like `__call__`; `mask` is None to ignore no key, `seq` is the number of all tokens of a row."""


class SpanContext(Context):
    """Attends to spans of keys one after another, without dropout."""

    def attend(
        self,
        inputs: tuple[torch.Tensor, torch.Tensor, torch.Tensor],
        mask: torch.Tensor | None,
        seq: int,
        dropout: float,
        causal: bool,
    ) -> torch.Tensor:
        mixed: torch.Tensor = _SpanAttention.apply(*inputs, self, mask, seq, causal)  # type: ignore[no-untyped-call]
        return mixed

    @abstractmethod
    def add_keys(
        self, attention: SpanAttention, key: torch.Tensor, value: torch.Tensor, seq: int
    ) -> Sequence[torch.Tensor]:
        """Attends to the keys of all ranks; returns the tensors that `add_gradients` needs."""

    @abstractmethod
    def add_gradients(
        self, gradients: SpanGradients, saved: Sequence[torch.Tensor], seq: int
    ) -> torch.Tensor:
        """Adds the gradients from all keys; returns the gradients of this rank's keys and values, stacked."""


class _SpanAttention(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        context: SpanContext,
        mask: torch.Tensor | None,
        seq: int,
        causal: bool,
    ) -> torch.Tensor:
        own = context.spans.of(context.collective.rank, seq)
        attention = SpanAttention(queries=Queries(query=query, spans=own, mask=mask, causal=causal))
        saved = context.add_keys(attention, key, value, seq)
        mixed, log_sum = attention.result()
        ctx.context, ctx.seq, ctx.causal = context, seq, causal
        ctx.save_for_backward(query, mixed, log_sum, mask, *saved)
        return mixed

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:
        query, mixed, log_sum, mask, *saved = ctx.saved_tensors
        own = ctx.context.spans.of(ctx.context.collective.rank, ctx.seq)
        queries = Queries(query=query, spans=own, mask=mask, causal=ctx.causal)
        gradients = SpanGradients(queries, gradient, (mixed.to(log_sum.dtype), log_sum))
        key, value = ctx.context.add_gradients(gradients, saved, ctx.seq).to(query.dtype)
        return gradients.query.to(query.dtype), key, value, None, None, None, None
