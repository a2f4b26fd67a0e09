"""Prepares a network for rows that are spread over ranks."""

from __future__ import annotations

from torch import nn

from ringspark.estimators.collectives import Collective
from ringspark.estimators.names import check_name
from ringspark.estimators.parallel.model.sequence import CONTEXTS
from ringspark.estimators.parallel.model.sequence.spans import Spans
from ringspark.estimators.parallel.model.sequence.spread_rows import SpreadRows
from ringspark.models.reports import CountingLayer
from ringspark.models.whole_rows import WholeRows


def spread_sequence(module: nn.Module, collective: Collective, way: str = "ring") -> None:
    """Has each rank of the collective compute a part of every row's tokens; changes `module` in place.

    Runs on every rank, on a whole network; no parameter changes. All ranks of the collective must call the
    network with the same rows, and get the same outputs. The gradient of every parameter is then partial:
    it is the sum over the ranks. What is drawn at random for tokens, such as dropout, has to differ between
    the ranks: seed them by their place on the sequence axis too.

    Args:
        collective: The ranks of a row; with one, nothing changes.
        way: A key of `CONTEXTS`.

    Raises:
        ValueError: `check_sequence` refuses the network.
    """
    check_sequence(module, way)
    if collective.size == 1:
        return
    kind, attentions = CONTEXTS[way], _attentions(module)
    is_causal = any(getattr(attention, "causal", False) for attention in attentions)
    spans = Spans(collective.size, zigzag=is_causal and kind.balances)
    context = kind(collective, spans)
    rows = SpreadRows(collective, spans)
    for part in module.modules():
        if isinstance(getattr(part, "rows", None), WholeRows):
            part.rows = rows  # type: ignore[assignment]
    for attention in attentions:
        attention.attend = context  # type: ignore[assignment]


def check_sequence(module: nn.Module, way: str = "ring") -> None:
    """Refuses a network whose rows cannot be spread; needs no rank, and no weights.

    Raises:
        ValueError: The way is unknown, the network does not offer what it takes, is spread already, a layer
            counts what it sees of a row, or drops attention weights where the way cannot.
    """
    check_name("way to spread rows", way, CONTEXTS, otherwise="")
    name, attentions = type(module).__name__, _attentions(module)
    if not isinstance(getattr(module, "rows", None), WholeRows) or not attentions:
        raise ValueError(
            f"model {name} cannot have rows spread over ranks: it needs an attribute `rows`, a WholeRows of "
            "ringspark.models.whole_rows that it asks for its tokens, and modules that mix tokens by an "
            "attribute `attend`; take transformer_classifier or transformer_lm, or set 'sequence' to 1"
        )
    if isinstance(module.rows, SpreadRows):
        raise ValueError(f"the rows of model {name} are spread already; spread them once")
    for key, layer in module.named_modules():
        if isinstance(layer, CountingLayer) and not isinstance(getattr(layer, "rows", None), WholeRows):
            raise ValueError(
                f"rows spread over ranks leave layer {key!r} a part of each row that it counts; give it an "
                "attribute `rows`, a WholeRows of ringspark.models.whole_rows that it asks for them, or "
                "set 'sequence' to 1"
            )
    drops = [getattr(attention, "dropout", 0.0) for attention in attentions]
    dropout = max((p for p in drops if isinstance(p, float)), default=0.0)
    if dropout > 0 and not CONTEXTS[way].takes_dropout:
        raise ValueError(
            f"rows spread by {way!r} take no dropout of attention weights, which they compute in parts and "
            f"twice, got attention_dropout={dropout}; set it to 0, or spread them by 'ulysses'"
        )


def _attentions(module: nn.Module) -> list[nn.Module]:
    return [part for part in module.modules() if callable(getattr(part, "attend", None))]
