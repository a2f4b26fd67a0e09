"""Attention of a rank's queries to keys that arrive in chunks, forward and backward."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import torch

from ringspark.estimators.parallel.model.sequence.partial_attention import (
    PartialSoftmax,
    attend_chunk,
    differentiate_chunk,
    merge,
)
from ringspark.estimators.parallel.model.sequence.spans import Span


def find_visible(query: Span, key: Span, causal: bool) -> list[tuple[Span, bool]]:
    """Returns the spans of `key` that the queries see, each with whether a query only sees keys up to itself.

    `key` contains `query`, or has no token of it.
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
    """A rank's queries.

    Attributes:
        query: (batch, heads, own tokens, head_dim).
        spans: Their spans in the row, in the order of `query`.
        mask: (batch, 1, 1, seq) booleans of all keys; None if all count.
        causal: Whether a query only sees keys up to itself.
    """

    query: torch.Tensor
    spans: Sequence[Span]
    mask: torch.Tensor | None
    causal: bool

    def pairs(self, key: Span) -> Iterator[tuple[int, slice, Span, torch.Tensor | None, bool]]:
        """Yields each span's number, slice of `query`, span of keys, mask, and whether it is causal."""
        begin = 0
        for number, span in enumerate(self.spans):
            own = slice(begin, begin + span[1] - span[0])
            for keys, causal in find_visible(span, key, self.causal):
                mask = None if self.mask is None else self.mask[..., keys[0] : keys[1]]
                yield number, own, keys, mask, causal
            begin = own.stop


@dataclass(kw_only=True)
class SpanAttention:
    """The forward pass: `add` attends to a chunk of keys, `result` merges all results."""

    queries: Queries
    _parts: dict[int, PartialSoftmax] = field(default_factory=dict)

    def add(self, key: torch.Tensor, value: torch.Tensor, spans: Sequence[Span]) -> None:
        for span, first in _with_first(spans):
            for number, own, keys, mask, causal in self.queries.pairs(span):
                at = slice(keys[0] - span[0] + first, keys[1] - span[0] + first)
                part = attend_chunk(
                    self.queries.query[:, :, own], key[:, :, at], value[:, :, at], mask, causal
                )
                self._parts[number] = merge(self._parts[number], part) if number in self._parts else part

    def result(self) -> PartialSoftmax:
        """Returns the means, in the queries' dtype, and the logarithms, in fp32 or fp64."""
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
    """The backward pass; `query` is the gradient of the queries so far, in fp32 or fp64."""

    def __init__(self, queries: Queries, gradient: torch.Tensor, whole: PartialSoftmax) -> None:
        self._queries, self._gradient, self._whole = queries, gradient, whole
        self.query = torch.zeros_like(queries.query, dtype=whole[0].dtype)

    def add(self, key: torch.Tensor, value: torch.Tensor, spans: Sequence[Span], into: torch.Tensor) -> None:
        """Adds the gradients that come from a chunk of keys to `into`, those of keys and values, stacked."""
        mean, log_sum = self._whole
        for span, first in _with_first(spans):
            for _, own, keys, mask, causal in self._queries.pairs(span):
                at = slice(keys[0] - span[0] + first, keys[1] - span[0] + first)
                found = differentiate_chunk(
                    self._gradient[:, :, own],
                    self._queries.query[:, :, own],
                    key[:, :, at],
                    value[:, :, at],
                    mask,
                    causal,
                    (mean[:, :, own], log_sum[:, :, own]),
                )
                for whole, part in zip(
                    (self.query[:, :, own], into[0][:, :, at], into[1][:, :, at]), found, strict=True
                ):
                    whole += part


def _with_first(spans: Sequence[Span]) -> Iterator[tuple[Span, int]]:
    """Yields spans with their offsets in a tensor that holds them end to end."""
    first = 0
    for span in spans:
        yield span, first
        first += span[1] - span[0]
