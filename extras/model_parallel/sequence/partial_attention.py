"""Attention to some of the keys: partial softmax results, which merge in any order.

Rabe and Staats 2021, "Self-attention Does Not Need O(n^2) Memory"; Dao et al. 2022, "FlashAttention". CPUs
use torch's flash kernel. Other devices use matrix products over a few queries at a time, because torch's
kernels there take no mask or return no logarithm.
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import torch

# Mean of the values, (batch, heads, queries, head_dim), and logarithm of the sum, (batch, heads, queries),
# -inf for a query without keys. Both in fp32, or fp64 if the queries are fp64.
PartialSoftmax = tuple[torch.Tensor, torch.Tensor]
Gradients = tuple[torch.Tensor, torch.Tensor, torch.Tensor]

# Number of queries whose scores are in memory at a time, for the matrix products.
QUERIES = 256

_FORWARD: Any = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
_BACKWARD: Any = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward


class Chunk(NamedTuple):
    """Queries and keys of one attention.

    Attributes:
        query, key, value: (batch, heads, tokens, head_dim).
        mask: (batch, 1, 1, keys) booleans, False for keys to ignore; None to ignore none.
        causal: Whether queries and keys are the same tokens, and each sees the tokens up to itself.
    """

    query: torch.Tensor
    key: torch.Tensor
    value: torch.Tensor
    mask: torch.Tensor | None
    causal: bool


def attend_chunk(chunk: Chunk) -> PartialSoftmax:
    """Returns the attention of these queries to these keys."""
    query, key, value, mask, causal = chunk
    if query.device.type != "cpu":
        return attend_by_products(chunk)
    mean, log_sum = _FORWARD(query, key, value, 0.0, causal, attn_mask=_bias(mask, query.dtype))
    if mask is not None:
        # For a query without keys the kernel returns the logarithm of 1.
        sees = (mask.cumsum(-1) > 0).squeeze(2) if causal else mask.any(-1)  # (batch, 1, queries or 1)
        log_sum = log_sum.masked_fill(~sees, -math.inf)
    return mean.to(log_sum.dtype), log_sum


def differentiate_chunk(gradient: torch.Tensor, chunk: Chunk, whole: PartialSoftmax) -> Gradients:
    """Returns this chunk's share of the gradients of its queries, keys and values.

    Args:
        gradient: Gradient of the attention output over all keys.
        whole: Result of these queries, merged over all keys.
    """
    query, key, value, mask, causal = chunk
    if query.device.type != "cpu":
        return differentiate_by_products(gradient, chunk, whole)
    # A query without keys has no weights; the kernel must not subtract infinities.
    log_sum = whole[1].masked_fill(whole[1] == -math.inf, math.inf)
    tensors = (gradient.to(query.dtype), query, key, value, whole[0].to(query.dtype), log_sum)
    found: Gradients = _BACKWARD(*tensors, 0.0, causal, attn_mask=_bias(mask, query.dtype))
    return found


def merge(one: PartialSoftmax, other: PartialSoftmax) -> PartialSoftmax:
    """Merges the results of two disjoint sets of keys."""
    greater = torch.maximum(one[1], other[1])
    # Not by the merged logarithm, because a large one has too few digits for weights that add up to one.
    greater = greater.masked_fill(greater == -math.inf, 0)
    weights = [(part[1] - greater).exp() for part in (one, other)]
    total = weights[0] + weights[1]
    shares = [(weight / total.clamp(min=1)).unsqueeze(-1) for weight in weights]
    return one[0] * shares[0] + other[0] * shares[1], greater + total.log()


def attend_by_products(chunk: Chunk) -> PartialSoftmax:
    means, logs = [], []
    for begin in range(0, chunk.query.shape[2], QUERIES):
        scores = _scores(chunk, begin)
        log_sum = scores.logsumexp(-1)
        finite = log_sum.masked_fill(log_sum == -math.inf, 0)
        weights = (scores - finite.unsqueeze(-1)).exp()
        means.append(weights @ chunk.value.to(weights.dtype))
        logs.append(log_sum)
    return torch.cat(means, 2), torch.cat(logs, 2)


def differentiate_by_products(gradient: torch.Tensor, chunk: Chunk, whole: PartialSoftmax) -> Gradients:
    mean, log_sum = whole
    log_sum = log_sum.masked_fill(log_sum == -math.inf, math.inf)
    queries: list[torch.Tensor] = []
    keys, values = (torch.zeros_like(x, dtype=mean.dtype) for x in (chunk.key, chunk.value))
    scale = chunk.query.shape[-1] ** -0.5
    wide_key, wide_value = chunk.key.to(mean.dtype), chunk.value.to(mean.dtype)
    for begin in range(0, chunk.query.shape[2], QUERIES):
        rows = slice(begin, begin + QUERIES)
        own = gradient[:, :, rows].to(mean.dtype)
        weights = (_scores(chunk, begin) - log_sum[:, :, rows, None]).exp()
        values += weights.mT @ own
        # Rows of the softmax's derivative are orthogonal to ones: subtract the mean under the weights.
        slopes = own @ wide_value.mT - (own * mean[:, :, rows]).sum(-1, keepdim=True)
        slopes = weights * slopes * scale
        queries.append(slopes @ wide_key)
        keys += slopes.mT @ chunk.query[:, :, rows].to(mean.dtype)
    return torch.cat(queries, 2), keys, values


def _scores(chunk: Chunk, begin: int) -> torch.Tensor:
    """Returns scores, (batch, heads, up to QUERIES, keys), -inf for keys that a query does not see."""
    query, key, _, mask, causal = chunk
    query = query[:, :, begin : begin + QUERIES]
    wide = torch.promote_types(query.dtype, torch.float32)
    scores: torch.Tensor = query.to(wide) @ key.to(wide).mT * query.shape[-1] ** -0.5
    if mask is not None:
        scores = scores.masked_fill(~mask, -math.inf)
    if causal:
        later = torch.ones(scores.shape[-2:], dtype=torch.bool, device=scores.device).triu(begin + 1)
        scores = scores.masked_fill(later, -math.inf)
    return scores


def _bias(mask: torch.Tensor | None, dtype: torch.dtype) -> torch.Tensor | None:
    if mask is None:
        return None
    return torch.zeros(mask.shape, dtype=dtype, device=mask.device).masked_fill(~mask, -math.inf)
