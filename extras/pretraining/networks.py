"""Networks that reconstruct their inputs: autoencoders of vectors, and a transformer for masked tokens."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import nn

from ringspark.models.checks import check_sizes
from ringspark.models.mlp import dense_trunk
from ringspark.models.reports import add_loss
from ringspark.models.transformer import TransformerClassifier, scores


def _perceptron(sizes: Sequence[int], activation: str) -> nn.Sequential:
    return nn.Sequential(*dense_trunk(sizes[0], sizes[1:-1], activation), nn.Linear(sizes[-2], sizes[-1]))


class Autoencoder(nn.Module):
    """An encoder to `code` numbers, and a decoder with the same hidden layers in reverse order.

    `innerCols={"encoder": ...}` adds the code as a column.

    Args:
        in_features: Numbers per row.
        code: Width of the code.
        hidden: Widths of the encoder's hidden layers. Without hidden layers the autoencoder is linear.
        activation: Activation after each hidden layer.
    """

    def __init__(
        self, in_features: int, code: int, hidden: Sequence[int] = (), activation: str = "relu"
    ) -> None:
        super().__init__()
        check_sizes(in_features=in_features, code=code)
        sizes = [in_features, *hidden, code]
        self.encoder = _perceptron(sizes, activation)
        self.decoder = _perceptron(sizes[::-1], activation)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Maps (batch, in_features) to its reconstruction."""
        out: torch.Tensor = self.decoder(self.encoder(x))
        return out


class VariationalAutoencoder(nn.Module):
    """A variational autoencoder with a Gaussian code (Kingma and Welling 2014).

    The squared error is a mean over the numbers of a row. So the divergence from the standard normal
    distribution, a sum over the code, is multiplied by 2 * variance / in_features. Then the sum of both is
    the negative evidence lower bound, up to a factor and a constant. In training, the code has random noise
    from the rank's own generator. In prediction, the code is its mean. `innerCols={"mean": ...}` adds it as a
    column.

    Args:
        in_features, code, hidden, activation: See `Autoencoder`.
        variance: Variance of a number around its reconstruction.
    """

    def __init__(
        self,
        in_features: int,
        code: int,
        hidden: Sequence[int] = (),
        activation: str = "relu",
        variance: float = 1.0,
    ) -> None:
        super().__init__()
        check_sizes(in_features=in_features, code=code)
        if variance <= 0:
            raise ValueError(f"variance must be above 0, got {variance}")
        self.factor = 2 * variance / in_features
        widths = [in_features, *hidden]
        self.trunk = dense_trunk(in_features, hidden, activation)
        self.mean, self.log_variance = nn.Linear(widths[-1], code), nn.Linear(widths[-1], code)
        self.decoder = _perceptron([code, *reversed(widths)], activation)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Maps (batch, in_features) to its reconstruction."""
        features = self.trunk(x)
        code = self.mean(features)
        if self.training:
            log_variance = self.log_variance(features)
            divergence = 0.5 * (code.square() + log_variance.exp() - 1 - log_variance).sum(1)  # (batch,)
            add_loss(self.factor * divergence)
            code = code + (0.5 * log_variance).exp() * torch.randn_like(code)
        out: torch.Tensor = self.decoder(code)
        return out


class MaskedTransformer(TransformerClassifier):
    """A `TransformerClassifier` that returns the logits of every position's token instead.

    The logits use the embedding's weights. A `TransformerClassifier` of the same sizes can load all of its
    weights except "head.*".

    Args:
        vocab_size, max_seq_len, dim, depth, num_heads, more: See `TransformerClassifier`. The mask token
            needs an id below `vocab_size`.
    """

    # Only a network with one output per row can be cut into pipeline stages.
    links = None  # type: ignore[assignment]

    def __init__(
        self, vocab_size: int, max_seq_len: int, dim: int, depth: int, num_heads: int, **more: Any
    ) -> None:
        super().__init__(vocab_size, max_seq_len, dim, depth, num_heads, out_features=1, **more)
        del self.head

    def forward(self, ids: torch.Tensor, mask: torch.Tensor | None = None) -> torch.Tensor:
        """Maps (batch, seq) token ids to (batch, seq, vocab_size)."""
        features = self._features(ids, self._real_tokens(ids, mask))
        return scores(features, self.tokens)
