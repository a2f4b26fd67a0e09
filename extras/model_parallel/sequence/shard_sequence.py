"""Prepares a network for context parallelism: a rank reads whole rows and computes some of the tokens.

After `pool`, which averages all tokens, every rank computes the same. So the gradients of later layers are
divided by the number of ranks, and their sum over the ranks counts each row once. For the layers before
`pool`, the backward pass of `pool` undoes the division.
"""

from __future__ import annotations

import torch
from torch import nn

from ringspark.estimators.collectives import Collective
from ringspark.extras.model_parallel.communication import all_reduce, apply_once, scale_gradient
from ringspark.extras.model_parallel.sequence import CONTEXTS
from ringspark.extras.model_parallel.sequence.spans import Spans
from ringspark.models.adapters import find_library
from ringspark.models.reports import CountingLayer
from ringspark.models.whole_rows import WholeRows


class ShardedRows(WholeRows):
    """Replaces `WholeRows` on every rank of the collective; these ranks read the same rows."""

    is_spread = True

    def __init__(self, collective: Collective, spans: Spans) -> None:
        self._collective, self._spans = collective, spans

    def own(self, x: torch.Tensor, dim: int) -> torch.Tensor:
        return self._spans.take(x, dim, self._collective.rank)

    def mask(self, mask: torch.Tensor | None, seq: int) -> torch.Tensor:
        # The shape of an empty mask has the number of tokens.
        return torch.empty((0, 1, 1, seq), dtype=torch.bool) if mask is None else mask

    def told(self, tokens: torch.Tensor | None, seq: int) -> torch.Tensor:
        # As for `mask`.
        return torch.empty((0, seq), dtype=torch.bool) if tokens is None else tokens

    def pool(self, x: torch.Tensor, tokens: torch.Tensor | None, seq: int) -> torch.Tensor:
        # Sums of many tokens would lose digits in 16 bits.
        wide = torch.promote_types(x.dtype, torch.float32)
        if tokens is None:
            return (self._total(x.sum(1, dtype=wide)) / seq).to(x.dtype)
        real = self.own(tokens, 1).unsqueeze(-1).to(x.dtype)  # (batch, own tokens, 1)
        number = tokens.sum(1, keepdim=True).clamp(min=1)
        return (self._total((x * real).sum(1, dtype=wide)) / number).to(x.dtype)

    def alike(self, outputs: torch.Tensor) -> torch.Tensor:
        return scale_gradient(outputs, 1 / self._collective.size)

    def joined(self, x: torch.Tensor, dim: int, seq: int) -> torch.Tensor:
        return apply_once(
            x,
            lambda x: self._spans.gather(x, dim, seq, self._collective),
            lambda gradient: self._spans.take(gradient, dim, self._collective.rank),  # equal on all ranks
        )

    def whole(self, x: torch.Tensor, dim: int, seq: int) -> torch.Tensor:
        return scale_gradient(self.joined(x, dim, seq), self._collective.size)

    def _total(self, x: torch.Tensor) -> torch.Tensor:
        """Sums `x` over the ranks. All ranks have the same gradient, so the backward pass sends nothing."""
        return scale_gradient(all_reduce(x, self._collective), self._collective.size)


def shard_sequence(module: nn.Module, collective: Collective, way: str = "ring") -> None:
    """Lets each rank compute some tokens of every row; changes `module` in place. Runs on every rank.

    `way`, a key of `CONTEXTS`, says how attention reaches the keys of other ranks. The gradients become
    partial: sum them over the ranks. The ranks must draw different random numbers, such as for dropout.
    """
    check_sequence(module, way)
    if collective.size == 1:
        return
    kind, attentions = CONTEXTS[way], _attentions(module)
    is_causal = any(getattr(attention, "causal", False) for attention in attentions)
    spans = Spans(collective.size, zigzag=is_causal and kind.balances)
    context = kind(collective, spans)
    rows = ShardedRows(collective, spans)
    for part in module.modules():
        if isinstance(getattr(part, "rows", None), WholeRows):
            part.rows = rows  # type: ignore[assignment]
    for attention in attentions:
        attention.attend = context  # type: ignore[assignment]


def check_sequence(module: nn.Module, way: str = "ring") -> None:
    """Refuses a network that context parallelism does not support; needs no ranks and no weights.

    Prepares networks of other libraries, in place.
    """
    if not hasattr(module, "rows") and (support := find_library(module)) is not None:
        support.prepare_sequence(module)
    name, attentions = type(module).__name__, _attentions(module)
    if not isinstance(getattr(module, "rows", None), WholeRows) or not attentions:
        raise ValueError(
            f"model {name} does not support parallelism's 'sequence': the model needs an attribute `rows`, "
            "a ringspark.models.whole_rows.WholeRows from which it takes its tokens, and modules that mix "
            "tokens by an attribute `attend`; take transformer_classifier or transformer_lm, or set "
            "'sequence' to 1"
        )
    for key, layer in module.named_modules():
        if isinstance(layer, CountingLayer) and not isinstance(getattr(layer, "rows", None), WholeRows):
            raise ValueError(
                f"parallelism's 'sequence' shards rows, but layer {key!r} counts over whole rows; give it "
                "an attribute `rows`, a ringspark.models.whole_rows.WholeRows from which it takes whole "
                "rows, or set 'sequence' to 1"
            )
    dropout = max((_find_dropout(attention) for attention in attentions), default=0.0)
    if dropout > 0 and not CONTEXTS[way].takes_dropout:
        raise ValueError(
            f"context {way!r} does not support dropout of attention weights, got attention_dropout="
            f"{dropout}; set it to 0, or set 'context' to 'ulysses'"
        )


def _find_dropout(attention: nn.Module) -> float:
    found = [getattr(attention, name, 0.0) for name in ("dropout", "attention_dropout", "attn_dropout")]
    rates = [getattr(drop, "p", drop) for drop in found]
    return max((rate for rate in rates if isinstance(rate, float)), default=0.0)


def _attentions(module: nn.Module) -> list[nn.Module]:
    return [part for part in module.modules() if callable(getattr(part, "attend", None))]
