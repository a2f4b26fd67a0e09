"""Attention to some of the keys at a time: parts of a softmax, and how they add up.

A part holds the mean of its own values and the logarithm of the sum of its exponentials; from these two the
parts of any cut of the keys merge to the whole, in any order (Rabe and Staats 2021, "Self-attention Does
Not Need O(n^2) Memory"; Dao et al. 2022, "FlashAttention"). The backward pass needs no other numbers: a
weight is exp(score - logarithm of the whole sum), whatever part its key is in.

On CPUs torch's own flash kernel computes a part. On other devices the same arithmetic is done by matrix
products, a few queries at a time, as torch's kernels there take no mask or give no logarithm.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import torch

# Mean of the values, (batch, heads, queries, head_dim); logarithm of the sum, (batch, heads, queries), -inf
# for a query that no key of the part is for. Both in fp32, or fp64 if the queries are.
Part = tuple[torch.Tensor, torch.Tensor]
Gradients = tuple[torch.Tensor, torch.Tensor, torch.Tensor]

# Of the matrix products: the scores of so many queries are in memory at a time.
QUERIES = 256

_FORWARD: Any = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
_BACKWARD: Any = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward


def attend_part(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, mask: torch.Tensor | None, causal: bool
) -> Part:
    """Returns what these queries get from these keys.

    Args:
        query, key, value: (batch, heads, tokens, head_dim).
        mask: (batch, 1, 1, keys) booleans, False for keys to be left out; None if there are none.
        causal: Whether queries and keys are the same tokens, and each sees those up to itself.
    """
    if query.device.type != "cpu":
        return multiplied_part(query, key, value, mask, causal)
    mean, log_sum = _FORWARD(query, key, value, 0.0, causal, attn_mask=_bias(mask, query.dtype))
    if mask is not None:
        # The kernel's logarithm for a query without keys is that of a sum of one.
        log_sum = log_sum.masked_fill(~_sees(mask, causal), -math.inf)
    return mean.to(log_sum.dtype), log_sum


def part_gradients(
    gradient: torch.Tensor,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    mask: torch.Tensor | None,
    causal: bool,
    whole: Part,
) -> Gradients:
    """Returns the gradients of queries, keys and values, as far as they come from these queries and keys.

    Args:
        gradient: Of the whole mean, in its shape.
        whole: Of these queries, merged from all parts.
    """
    mean, log_sum = whole
    if query.device.type != "cpu":
        return multiplied_gradients(gradient, query, key, value, mask, causal, whole)
    # A query without any key has no weights; the kernel must not subtract infinities for it.
    log_sum = log_sum.masked_fill(log_sum == -math.inf, math.inf)
    tensors = (gradient.to(query.dtype), query, key, value, mean.to(query.dtype), log_sum)
    found: Gradients = _BACKWARD(*tensors, 0.0, causal, attn_mask=_bias(mask, query.dtype))
    return found


def merged(one: Part, other: Part) -> Part:
    """Returns the part of the keys of two parts without common keys."""
    greater = torch.maximum(one[1], other[1])
    # Not by the merged logarithm: a large one has too few digits for weights that add up to one.
    greater = greater.masked_fill(greater == -math.inf, 0)
    weights = [(part[1] - greater).exp() for part in (one, other)]
    total = weights[0] + weights[1]
    shares = [(weight / total.clamp(min=1)).unsqueeze(-1) for weight in weights]
    return one[0] * shares[0] + other[0] * shares[1], greater + total.log()


def multiplied_part(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, mask: torch.Tensor | None, causal: bool
) -> Part:
    """`attend_part` by matrix products."""
    means, logs = [], []
    for begin, some in _few(query):
        scores = _scores(some, key, mask, causal, begin)
        log_sum = scores.logsumexp(-1)
        finite = log_sum.masked_fill(log_sum == -math.inf, 0)
        weights = (scores - finite.unsqueeze(-1)).exp()
        means.append(weights @ value.to(weights.dtype))
        logs.append(log_sum)
    return torch.cat(means, 2), torch.cat(logs, 2)


def multiplied_gradients(
    gradient: torch.Tensor,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    mask: torch.Tensor | None,
    causal: bool,
    whole: Part,
) -> Gradients:
    """`part_gradients` by matrix products."""
    mean, log_sum = whole
    log_sum = log_sum.masked_fill(log_sum == -math.inf, math.inf)
    queries: list[torch.Tensor] = []
    keys, values = (torch.zeros_like(x, dtype=mean.dtype) for x in (key, value))
    scale = query.shape[-1] ** -0.5
    wide_key, wide_value = key.to(mean.dtype), value.to(mean.dtype)
    for begin, some in _few(query):
        rows = slice(begin, begin + some.shape[2])
        own = gradient[:, :, rows].to(mean.dtype)
        weights = (_scores(some, key, mask, causal, begin) - log_sum[:, :, rows, None]).exp()
        values += weights.mT @ own
        # Each row of the softmax's derivative is orthogonal to ones: subtract the mean under the weights.
        slopes = own @ wide_value.mT - (own * mean[:, :, rows]).sum(-1, keepdim=True)
        slopes = weights * slopes * scale
        queries.append(slopes @ wide_key)
        keys += slopes.mT @ some.to(mean.dtype)
    return torch.cat(queries, 2), keys, values


def _few(query: torch.Tensor) -> Iterator[tuple[int, torch.Tensor]]:
    for begin in range(0, query.shape[2], QUERIES):
        yield begin, query[:, :, begin : begin + QUERIES]


def _scores(
    query: torch.Tensor, key: torch.Tensor, mask: torch.Tensor | None, causal: bool, begin: int
) -> torch.Tensor:
    """Returns scores, (batch, heads, queries, keys), -inf where a query does not see a key."""
    wide = torch.promote_types(query.dtype, torch.float32)
    scores: torch.Tensor = query.to(wide) @ key.to(wide).mT * query.shape[-1] ** -0.5
    if mask is not None:
        scores = scores.masked_fill(~mask, -math.inf)
    if causal:
        later = torch.ones(scores.shape[-2:], dtype=torch.bool, device=scores.device).triu(begin + 1)
        scores = scores.masked_fill(later, -math.inf)
    return scores


def _bias(mask: torch.Tensor | None, dtype: torch.dtype) -> torch.Tensor | None:
    """Returns what the kernel adds to the scores."""
    if mask is None:
        return None
    return torch.zeros(mask.shape, dtype=dtype, device=mask.device).masked_fill(~mask, -math.inf)


def _sees(mask: torch.Tensor, causal: bool) -> torch.Tensor:
    """Returns which queries see a key: (batch, 1, 1), or (batch, 1, queries) if `causal`."""
    return (mask.cumsum(-1) > 0).squeeze(2) if causal else mask.any(-1)
