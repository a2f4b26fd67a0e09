"""Attention of a rank's queries to keys that arrive in chunks, forward and backward."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import torch

from ringspark.extras.model_parallel.sequence.partial_attention import (
    Chunk,
    PartialSoftmax,
    attend_chunk,
    differentiate_chunk,
    merge,
)
from ringspark.extras.model_parallel.sequence.spans import Span


def find_visible(query: Span, key: Span, causal: bool) -> list[tuple[Span, bool]]:
    """Returns the spans of `key` that the queries see, each with whether causal masking applies inside it.

    `key` contains all tokens of `query`, or none.
    """
    if query[0] == query[1] or key[0] == key[1]:
        return []
    if not causal:
        return [(key, False)]
    before = (key[0], min(key[1], query[0]))
    found = [(before, False)] if before[0] < before[1] else []
    return [*found, (query, True)] if key[0] <= query[0] and query[1] <= key[1] else found


@dataclass(frozen=True, kw_only=True)
class Queries:
    """A rank's queries, (batch, heads, tokens of this rank, head_dim), and their spans in the row.

    Attributes:
        mask: (batch, 1, 1, seq) booleans for all keys, False for keys to ignore; None to ignore none.
        causal: Whether a query only sees keys up to itself.
    """

    query: torch.Tensor
    spans: Sequence[Span]
    mask: torch.Tensor | None
    causal: bool

    def chunks(
        self, key: torch.Tensor, value: torch.Tensor, spans: Sequence[Span]
    ) -> Iterator[tuple[int, slice, slice, Chunk]]:
        """Yields (number of a query span, its slice of `query`, the slice of `key` it sees, `Chunk`)."""
        first = 0
        for span in spans:
            begin = 0
            for number, (start, stop) in enumerate(self.spans):
                own = slice(begin, begin + stop - start)
                for (low, high), causal in find_visible((start, stop), span, self.causal):
                    at = slice(low - span[0] + first, high - span[0] + first)
                    mask = None if self.mask is None else self.mask[..., low:high]
                    yield (
                        number,
                        own,
                        at,
                        Chunk(self.query[:, :, own], key[:, :, at], value[:, :, at], mask, causal),
                    )
                begin = own.stop
            first += span[1] - span[0]


@dataclass(kw_only=True)
class SpanAttention:
    """The forward pass: `add` attends to keys of some spans, `result` merges all results."""

    queries: Queries
    _parts: dict[int, PartialSoftmax] = field(default_factory=dict)

    def add(self, key: torch.Tensor, value: torch.Tensor, spans: Sequence[Span]) -> None:
        for number, _, _, chunk in self.queries.chunks(key, value, spans):
            part = attend_chunk(chunk)
            self._parts[number] = merge(self._parts[number], part) if number in self._parts else part

    def result(self) -> PartialSoftmax:
        """Returns the attention output, in the queries' dtype, and the log-sum-exp, in fp32 or fp64."""
        query = self.queries.query
        batch, heads, tokens, width = query.shape
        wide = torch.promote_types(query.dtype, torch.float32)
        mean = query.new_zeros((batch, tokens, heads, width)).transpose(1, 2)
        log_sum = query.new_full((batch, heads, tokens), -math.inf, dtype=wide)
        begin = 0
        for number, span in enumerate(self.queries.spans):
            own = slice(begin, begin + span[1] - span[0])
            if number in self._parts:
                mean[:, :, own], log_sum[:, :, own] = self._parts[number]
            begin = own.stop
        return mean, log_sum


class SpanGradients:
    """The backward pass: `add` adds the gradients of keys to `into[0]` and of values to `into[1]`.

    `query` is the sum of the gradients of the queries so far, in fp32 or fp64.
    """

    def __init__(self, queries: Queries, gradient: torch.Tensor, whole: PartialSoftmax) -> None:
        self._queries, self._gradient, self._whole = queries, gradient, whole
        self.query = torch.zeros_like(queries.query, dtype=whole[0].dtype)

    def add(self, key: torch.Tensor, value: torch.Tensor, spans: Sequence[Span], into: torch.Tensor) -> None:
        mean, log_sum = self._whole
        for _, own, at, chunk in self._queries.chunks(key, value, spans):
            found = differentiate_chunk(
                self._gradient[:, :, own], chunk, (mean[:, :, own], log_sum[:, :, own])
            )
            for whole, part in zip(
                (self.query[:, :, own], into[0][:, :, at], into[1][:, :, at]), found, strict=True
            ):
                whole += part
