"""Networks for tables that predict their own masked inputs, with the layers of `TabPack` and `TabM`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from ringspark.extras.tables.tabm import TabM
from ringspark.extras.tables.tabpack import TabPack

# Arguments of a network that depend on the label.
OF_LABEL = ("out_features", "center", "scale", "averages", "link")
# Patterns of the weights that depend on the number of outputs.
OF_OUTPUTS = ("head.*", "heads", "biases", "effects.*", "shares", "temperature")


class MaskedTabPack(TabPack):
    """A `TabPack` with one output per number and one logit per id of each category.

    Args:
        edges, cardinalities, more: See `TabPack`.
    """

    # A pack chooses members by their errors in the label, and there is no label yet.
    choose_on = None  # type: ignore[assignment]

    def __init__(self, edges: Sequence[Sequence[float]], cardinalities: Sequence[int], **more: Any) -> None:
        super().__init__(edges, cardinalities, len(edges) + sum(cardinalities), **more)


class MaskedTabM(TabM):
    """A `TabM` with one output per number and one logit per id of each category.

    Args:
        edges, cardinalities, more: See `TabM`.
    """

    def __init__(self, edges: Sequence[Sequence[float]], cardinalities: Sequence[int], **more: Any) -> None:
        super().__init__(edges, cardinalities, len(edges) + sum(cardinalities), **more)


PRETRAINING = {
    "tabpack": "ringspark.extras.pretraining.table_networks:MaskedTabPack",
    "tabm": "ringspark.extras.pretraining.table_networks:MaskedTabM",
}
