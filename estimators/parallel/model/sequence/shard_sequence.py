"""Prepares a network for context parallelism."""

from __future__ import annotations

from torch import nn

from ringspark.estimators.collectives import Collective
from ringspark.estimators.names import check_name
from ringspark.estimators.parallel.model.sequence import CONTEXTS
from ringspark.estimators.parallel.model.sequence.sharded_rows import ShardedRows
from ringspark.estimators.parallel.model.sequence.spans import Spans
from ringspark.models.reports import CountingLayer
from ringspark.models.whole_rows import WholeRows


def shard_sequence(module: nn.Module, collective: Collective, way: str = "ring") -> None:
    """Lets each rank compute its tokens of every row; changes `module` in place. Runs on every rank.

    All ranks call the network with the same rows and get the same outputs. The gradients become partial: sum
    them over the ranks. Random numbers of tokens, such as dropout, must differ between ranks.

    Args:
        module: A whole network; its parameters do not change.
        way: A key of `CONTEXTS`.
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
    """Refuses a network that context parallelism does not support; needs no ranks and no weights."""
    check_name("context", way, CONTEXTS, otherwise="")
    name, attentions = type(module).__name__, _attentions(module)
    if not isinstance(getattr(module, "rows", None), WholeRows) or not attentions:
        raise ValueError(
            f"model {name} does not support parallelism's 'sequence': it needs an attribute `rows`, a "
            "WholeRows of ringspark.models.whole_rows that it calls for its tokens, and modules that mix "
            "tokens by an attribute `attend`; take transformer_classifier or transformer_lm, or set "
            "'sequence' to 1"
        )
    if isinstance(module.rows, ShardedRows):
        raise ValueError(f"the rows of model {name} are sharded already; call shard_sequence once")
    for key, layer in module.named_modules():
        if isinstance(layer, CountingLayer) and not isinstance(getattr(layer, "rows", None), WholeRows):
            raise ValueError(
                f"parallelism's 'sequence' shards the rows that layer {key!r} counts; give the layer an "
                "attribute `rows`, a WholeRows of ringspark.models.whole_rows that it calls for its tokens, "
                "or set 'sequence' to 1"
            )
    drops = [getattr(attention, "dropout", 0.0) for attention in attentions]
    dropout = max((p for p in drops if isinstance(p, float)), default=0.0)
    if dropout > 0 and not CONTEXTS[way].takes_dropout:
        raise ValueError(
            f"context {way!r} does not support dropout of attention weights, got attention_dropout="
            f"{dropout}; set it to 0, or set 'context' to 'ulysses'"
        )


def _attentions(module: nn.Module) -> list[nn.Module]:
    return [part for part in module.modules() if callable(getattr(part, "attend", None))]
