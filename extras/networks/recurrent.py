"""Recurrent networks over sequences of numbers or token ids: GRU, LSTM or Elman layers, and a linear head.

Cho et al. 2014 (GRU), Hochreiter and Schmidhuber 1997 (LSTM). Each layer can run on one sequence chunk at a
time, so the layers of a pipeline can compute different chunks at once.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import nn

from ringspark.models.chain import Link, State
from ringspark.models.checks import check_choice, check_dropout, check_sizes

CELLS: dict[str, Callable[..., nn.RNNBase]] = {"gru": nn.GRU, "lstm": nn.LSTM, "rnn": nn.RNN}
POOLS = ("last", "mean")
Masked = tuple[torch.Tensor, torch.Tensor | None]


class RecurrentLayer(nn.Module):
    """One recurrent layer and dropout on its outputs: (batch, time, width) -> (batch, time, hidden)."""

    def __init__(self, kind: str, width: int, hidden: int, dropout: float) -> None:
        super().__init__()
        self.cell = CELLS[kind](width, hidden, batch_first=True)
        self.dropout = nn.Dropout(dropout)

    def forward(self, x: torch.Tensor, state: State = None) -> tuple[torch.Tensor, State]:
        """Runs the layer on (batch, time, width), starting from the state that the previous chunk ended with.

        Returns:
            Outputs (batch, time, hidden), and the state after the last time step.
        """
        is_lstm = isinstance(self.cell, nn.LSTM)
        given = state if state is None or is_lstm else state[0]
        y, after = self.cell(x, given)
        return self.dropout(y), after if is_lstm else (after,)


class Recurrent(nn.Module):
    """Recurrent layers and a linear head on a summary of each row; the outputs are logits or values.

    Args:
        hidden: Width of each layer.
        out_features: Outputs per row.
        in_features: Numbers per time step, if rows are (time, in_features) numbers. Give this or
            `vocab_size`.
        vocab_size: Number of token ids, if rows are ids from 0 to `vocab_size - 1`.
        dim: Width of the embeddings of ids; None means `hidden`.
        depth: Number of layers.
        kind: A name in `CELLS`.
        pool: Input of the head: "last" for the outputs of the row's last time step, or "mean" for the mean
            over time steps. Padding is left out.
        dropout: Dropout probability on the outputs of every layer except the last.
        padding_id: Token id that pads the end of rows. Not used if `forward` gets a mask.

    Raises:
        ValueError: If an argument is out of range, or if both or neither of `in_features` and `vocab_size`
            are given.
    """

    def __init__(
        self,
        hidden: int,
        out_features: int,
        in_features: int | None = None,
        vocab_size: int | None = None,
        dim: int | None = None,
        depth: int = 1,
        kind: str = "gru",
        pool: str = "last",
        dropout: float = 0.0,
        padding_id: int | None = None,
    ) -> None:
        super().__init__()
        if (in_features is None) == (vocab_size is None):
            raise ValueError(
                f"recurrent takes in_features (rows of numbers) or vocab_size (rows of ids), got "
                f"{in_features} and {vocab_size}; give one of them"
            )
        optional = {"in_features": in_features, "vocab_size": vocab_size, "dim": dim}
        given = {name: size for name, size in optional.items() if size is not None}
        check_sizes(hidden=hidden, out_features=out_features, depth=depth, **given)
        check_choice("kind", kind, CELLS)
        check_choice("pool", pool, POOLS)
        check_dropout("dropout", dropout)
        if padding_id is not None and not 0 <= padding_id < (vocab_size or 0):
            raise ValueError(f"padding_id needs vocab_size and must be below it, got {padding_id}")
        self.pool, self.padding_id = pool, padding_id
        self.tokens = None if vocab_size is None else nn.Embedding(vocab_size, dim or hidden)
        width = (dim or hidden) if in_features is None else in_features
        self.layers = nn.ModuleList(
            RecurrentLayer(kind, hidden if i else width, hidden, dropout if i + 1 < depth else 0.0)
            for i in range(depth)
        )
        self.head = nn.Linear(hidden, out_features)

    def forward(self, x: torch.Tensor, mask: torch.Tensor | None = None) -> torch.Tensor:
        """Maps (batch, time, in_features) numbers or (batch, time) ids to (batch, out_features).

        Args:
            mask: (batch, time), 0 for padding at a row's end. If it is None, `padding_id` marks the padding.
                If a row is nothing but padding, the head gets zeros.
        """
        y, real = self._vectors(x, mask)
        for layer in self.layers:
            y, _ = layer(y)
        return self._pooled_head(y, real)

    def links(self) -> list[Link]:
        layers = [_LayerLink(layer) for layer in self.layers]
        first = Link("tokens", self._vectors, ("tokens",), self._vectors_over_time)
        return [
            *([] if self.tokens is None else [first]),
            *(Link(f"layers.{i}", run, (f"layers.{i}",), run.over_time) for i, run in enumerate(layers)),
            Link("head", self._pooled_head, ("head",)),
        ]

    def _vectors(self, x: torch.Tensor, mask: torch.Tensor | None = None) -> Masked:
        """Returns vectors (batch, time, width), and booleans (batch, time) that are False for padding."""
        real = None if mask is None else mask.bool()
        if self.tokens is None:
            return x, real
        ids = x.long()
        if real is None and self.padding_id is not None:
            real = ids != self.padding_id
        return self.tokens(ids), real

    def _vectors_over_time(
        self, state: State, x: torch.Tensor, mask: torch.Tensor | None = None
    ) -> tuple[Masked, State]:
        return self._vectors(x, mask), None

    def _pooled_head(self, y: torch.Tensor, real: torch.Tensor | None = None) -> torch.Tensor:
        if real is None:
            pooled = y[:, -1] if self.pool == "last" else y.mean(1)
        else:
            weights = real.bool()
            if self.pool == "last":
                left = weights.flip(1).cumsum(1).flip(1)  # (batch, time): tokens from here to the end
                weights = weights & (left == 1)
            # At least in fp32: 16 bits cannot count beyond some hundreds.
            numbers = weights.unsqueeze(-1).to(torch.promote_types(y.dtype, torch.float32))
            pooled = ((y * numbers).sum(1) / numbers.sum(1).clamp(min=1)).to(y.dtype)
        out: torch.Tensor = self.head(pooled)
        return out


class _LayerLink:
    def __init__(self, layer: nn.Module) -> None:
        self.layer = layer

    def __call__(self, x: torch.Tensor, mask: torch.Tensor | None = None) -> Masked:
        return self.over_time(None, x, mask)[0]

    def over_time(
        self, state: State, x: torch.Tensor, mask: torch.Tensor | None = None
    ) -> tuple[Masked, State]:
        y, after = self.layer(x, state)
        return (y, mask), after
