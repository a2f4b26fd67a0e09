"""What lies between the cut layers: whole values on every rank, or each rank's part of the tokens.

Shoeybi et al. 2019 leave norms, dropouts and residuals whole: every rank computes all of them, and an
all-reduce makes the values whole where a cut region ends, and their gradient where it begins. Korthikanti et
al. 2022, "Reducing Activation Recomputation in Large Transformer Models", cut them by tokens: an all-gather
enters a region and a reduce-scatter leaves it, which together send what the all-reduce did, and a rank keeps
and computes 1/n of what is between.

The gradients of parameters that are used between the regions are then partial: the whole is the sum over the
ranks, see `partial.py`.
"""

from __future__ import annotations

from typing import Any, Protocol

import torch

from ringspark.estimators.collectives import Collective
from ringspark.estimators.parallel.cut import length_of_part
from ringspark.estimators.parallel.model.communication import (
    copied,
    cut_along,
    joined,
    joined_for_parts,
    scaled_gradient,
    scattered,
    summed,
)
from ringspark.models.whole_rows import WholeRows

# Of (batch, seq, dim).
_TOKENS = 1


class Between(Protocol):
    """How values enter and leave a region of cut layers."""

    def enter(self, x: torch.Tensor) -> torch.Tensor:
        """Returns all tokens of what is between; the gradients of the ranks' uses are summed."""

    def leave(self, x: torch.Tensor) -> torch.Tensor:
        """Sums a partial value of all tokens, and returns what is between."""


class WholeBetween:
    """Values between the regions are whole on every rank."""

    def __init__(self, collective: Collective) -> None:
        self._collective = collective

    def enter(self, x: torch.Tensor) -> torch.Tensor:
        return copied(x, self._collective)

    def leave(self, x: torch.Tensor) -> torch.Tensor:
        return summed(x, self._collective)


class PartsBetween:
    """Values between the regions are this rank's tokens, (batch, own seq, dim).

    Attributes:
        length: Number of all tokens of the rows that the network computes; parts may be uneven or empty, so
            they do not tell it.
    """

    def __init__(self, collective: Collective) -> None:
        self.collective = collective
        self.length = 0

    def __deepcopy__(self, memo: dict[int, Any]) -> PartsBetween:
        # A copy of a network stays in its gang.
        return self

    def enter(self, x: torch.Tensor) -> torch.Tensor:
        own = length_of_part(self.length, self.collective.rank, self.collective.size)
        if x.shape[_TOKENS] != own:
            raise ValueError(
                f"a layer that 'tensor' cuts got {x.shape[_TOKENS]:,} tokens of {self.length:,}, of which "
                f"this worker has {own:,}; ask `rows.embedded` for the embeddings, one length a pass, or "
                "leave 'between' out"
            )
        return joined_for_parts(x, _TOKENS, self.collective, self.length)

    def leave(self, x: torch.Tensor) -> torch.Tensor:
        return scattered(x, _TOKENS, self.collective)


class PartRows(WholeRows):
    """Takes the place of a network's rows where the layers between cut ones work on parts of the tokens.

    Every rank reads all tokens and returns whole outputs. Ranks may have a part of longer rows already: then
    those rows' own hooks come first, and all tokens here are that part.
    """

    def __init__(self, rows: WholeRows, between: PartsBetween, *, is_table_cut: bool) -> None:
        """Stands before the first pass.

        Args:
            rows: What the network asked before.
            is_table_cut: Whether the table of embeddings is cut by its ids, and so looked up by all ranks
                for all tokens.
        """
        self._rows, self._between, self._is_table_cut = rows, between, is_table_cut

    def __deepcopy__(self, memo: dict[int, Any]) -> PartRows:
        return self

    def own(self, x: torch.Tensor, dim: int) -> torch.Tensor:
        ranks = self._between.collective
        return cut_along(self._rows.own(x, dim), dim, ranks.rank, ranks.size)

    def embedded(self, table: torch.nn.Module, ids: torch.Tensor) -> torch.Tensor:
        tokens = self._rows.own(ids, 1)
        self._between.length = tokens.shape[1]
        found: torch.Tensor = table(tokens if self._is_table_cut else self.own(ids, 1))
        return found

    def mask(self, mask: torch.Tensor | None, seq: int) -> torch.Tensor | None:
        return self._rows.mask(mask, seq)

    def told(self, tokens: torch.Tensor | None, seq: int) -> torch.Tensor | None:
        return self._rows.told(tokens, seq)

    def pool(self, x: torch.Tensor, tokens: torch.Tensor | None, seq: int) -> torch.Tensor:
        # Behind it every rank has an equal share of the gradient; see `alike`.
        own = scaled_gradient(x, self._between.collective.size)
        return self._rows.pool(self._joined(own), tokens, seq)

    def alike(self, outputs: torch.Tensor) -> torch.Tensor:
        # What all ranks compute alike counts once in the sum over them.
        return scaled_gradient(self._rows.alike(outputs), 1 / self._between.collective.size)

    def joined(self, x: torch.Tensor, dim: int, seq: int) -> torch.Tensor:
        # Tokens that were compared with a cut table are whole already.
        whole = x if self._is_table_cut else self._joined(x)
        return self._rows.joined(whole, dim, seq)

    def _joined(self, x: torch.Tensor) -> torch.Tensor:
        return joined(x, _TOKENS, self._between.collective, self._between.length)
