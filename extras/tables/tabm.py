"""TabM: an ensemble of networks for tables, which share their weight matrices.

Gorishniy, Kotelnikov and Babenko 2024, "TabM: Advancing Tabular Deep Learning with Parameter-Efficient
Ensembling". Numbers go through piecewise-linear embeddings (Gorishniy, Rubachev and Babenko 2022, "On
Embeddings for Numerical Features in Tabular Deep Learning"). The members differ by vectors that scale the
inputs and outputs of shared matrices (Wen, Tran and Ba 2020, "BatchEnsemble").
"""

import math
from collections.abc import Sequence
from itertools import accumulate, pairwise
from statistics import NormalDist

import torch
from torch import nn
from torch.nn import functional

from ringspark.models.chain import Link
from ringspark.models.checks import check_dropout, check_sizes

# Embeddings of rare categories start small, so that they do not drown the numbers in noise.
RARE_FROM, RARE_STD, STD = 40, 0.05, 0.3
# Class of rows that torch's cross entropy leaves out.
IGNORED = -100


class NumberBins(nn.Module):
    """Computes features of each number: the fill of each bin, a rank, the value, and a flag for NaN.

    The rank is the mean fill of the bins, as a quantile of the normal distribution.

    Args:
        edges: For each number, the ascending edges of its bins: at least two.
    """

    def __init__(self, edges: Sequence[Sequence[float]]) -> None:
        super().__init__()
        if any(len(each) < 2 or any(a >= b for a, b in pairwise(each)) for each in edges):
            raise ValueError("edges must hold, for each column, at least two numbers in ascending order")
        bins = max((len(each) for each in edges), default=2) - 1
        # Columns with fewer bins get bins that no number reaches.
        starts = torch.tensor([[*each[:-1], *[math.inf] * (bins + 1 - len(each))] for each in edges])
        widths = torch.tensor(
            [[*(b - a for a, b in pairwise(each)), *[1.0] * (bins + 1 - len(each))] for each in edges]
        )
        self.features = bins + 3
        self.register_buffer("starts", starts.reshape(len(edges), bins))
        self.register_buffer("widths", widths.reshape(len(edges), bins))
        self.register_buffer("counts", torch.tensor([len(each) - 1.0 for each in edges]))

    def forward(self, numbers: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Maps (batch, M) numbers, NaN if missing, to features (batch, M, features) and ranks (batch, M)."""
        assert isinstance(self.starts, torch.Tensor)
        assert isinstance(self.widths, torch.Tensor)
        assert isinstance(self.counts, torch.Tensor)
        missing = torch.isnan(numbers)
        known = numbers.masked_fill(missing, 0.0)
        filled = ((known[:, :, None] - self.starts) / self.widths).clamp(0.0, 1.0)
        share = (filled.sum(2) / self.counts).clamp(1e-3, 1 - 1e-3)
        # As a quantile of the normal distribution.
        rank = math.sqrt(2) * torch.erfinv(2 * share - 1)
        features = torch.cat([filled - 0.5, rank[:, :, None], known.clamp(-4.0, 4.0)[:, :, None]], 2)
        features = features.masked_fill(missing[:, :, None], 0.0)
        features = torch.cat([features, missing[:, :, None].to(features.dtype)], 2)
        return features, features[:, :, -3]


class NumberEmbedding(nn.Module):
    """Piecewise-linear embeddings of M numbers, with a learned embedding of a missing number.

    Args:
        edges: See `NumberBins`.
        width: Width of each embedding.
    """

    def __init__(self, edges: Sequence[Sequence[float]], width: int) -> None:
        super().__init__()
        self.bins = NumberBins(edges)
        self.weight = nn.Parameter(torch.randn(len(edges), self.bins.features, width) * 0.15)
        self.bias = nn.Parameter(torch.zeros(len(edges), width))

    def forward(self, numbers: torch.Tensor) -> torch.Tensor:
        """Maps (batch, M) numbers, NaN if missing, to (batch, M * (width + 1))."""
        features, ranks = self.bins(numbers)
        embedded = torch.einsum("bmn,mnd->bmd", features, self.weight) + self.bias
        return torch.cat([torch.relu(embedded).flatten(1), ranks], 1)


class TableNetwork(nn.Module):
    """Base class of the networks for tables. Hides ids, scales outputs to the label, and calibrates logits.

    Args:
        edges, cardinalities, unknown: See `TabM`.
        center, scale: Mean and standard deviation of the label of a regression. With link="log": logarithm
            of the label's mean, and the divisor of the gradients.
        averages: "values" or "probabilities": the outputs of the members to average.
        link: "log" if the prediction is a positive mean, exp(center + output), else "identity".
        quantiles: Ascending probabilities; the outputs are the label's quantiles for them. Empty: the mean.
    """

    effects: nn.ModuleList

    def __init__(
        self,
        edges: Sequence[Sequence[float]],
        cardinalities: Sequence[int],
        unknown: float,
        center: float,
        scale: float,
        averages: str,
        link: str,
        quantiles: Sequence[float],
    ) -> None:
        super().__init__()
        check_dropout("unknown", unknown)
        if not edges and not cardinalities:
            raise ValueError("edges and cardinalities are both empty; give a number or a category")
        if averages not in ("values", "probabilities"):
            raise ValueError(f"averages must be 'values' or 'probabilities', got {averages!r}")
        if link not in ("identity", "log"):
            raise ValueError(f"link must be 'identity' or 'log', got {link!r}")
        self.center, self.scale, self.averages, self.unknown = center, scale, averages, unknown
        self.is_log, self.quantiles = link == "log", tuple(quantiles)
        # Names with many values also shift the output on their own, like a random effect of statistics.
        self.effect_columns = [column for column, n in enumerate(cardinalities) if n > RARE_FROM]
        if averages == "probabilities":
            # The metric "temperature" sets it in the saved network.
            self.calibrates = True
            self.register_buffer("temperature", torch.ones(()))

    def hide_some(self, ids: torch.Tensor) -> torch.Tensor:
        """Returns the ids, (batch, K). In training, replaces a random share `unknown` of them with 0."""
        if self.training and self.unknown:
            ids = ids.masked_fill(torch.rand(ids.shape, device=ids.device) < self.unknown, 0)
        return ids

    def add_effects(
        self, outputs: torch.Tensor, ids: torch.Tensor, offset: torch.Tensor | None = None
    ) -> torch.Tensor:
        """Adds the effects of frequent names, and the offset, (batch,), to outputs (..., batch, outputs)."""
        for column, table in zip(self.effect_columns, self.effects, strict=True):
            outputs = outputs + table(ids[:, column])
        if offset is None:
            return outputs
        if self.averages == "probabilities":  # of the last class
            return outputs + functional.pad(offset.float()[:, None], (outputs.shape[-1] - 1, 0))
        return outputs + offset.float()[:, None] / (1 if self.is_log else self.scale)

    @property
    def initial_outputs(self) -> torch.Tensor:
        """Outputs that predict the quantiles of a standardized normal label, (quantiles,)."""
        first, *others = map(NormalDist().inv_cdf, self.quantiles)
        # The inverse of softplus.
        return torch.tensor([first, *(math.log(math.expm1(b - a)) for a, b in pairwise([first, *others]))])

    def to_distances(self, outputs: torch.Tensor) -> torch.Tensor:
        """Returns the lowest quantile and the distances between neighbors, which are never negative.

        Their means over members are not negative either, so the quantiles of the mean do not cross. Without
        quantiles, returns the outputs.
        """
        if not self.quantiles:
            return outputs
        return torch.cat([outputs[..., :1], functional.softplus(outputs[..., 1:])], -1)

    def to_label(self, outputs: torch.Tensor) -> torch.Tensor:
        """Returns predictions of the label in fp32 or wider. 16 bits would lose a small scale.

        With quantiles, `outputs` are distances (`to_distances`), which are summed first.
        """
        outputs = outputs.to(torch.promote_types(outputs.dtype, torch.float32))
        # The squared error has the square of the label's unit, and the other losses have the unit.
        unit = self.scale if self.is_log or self.quantiles else self.scale**2
        if self.training and unit != 1 and outputs.requires_grad:
            # As for a standardized label. Adam's epsilon would swallow a tiny gradient.
            outputs.register_hook(lambda gradient: gradient / unit)  # type: ignore[no-untyped-call]
        if self.is_log:
            # Outside of this range, the mean overflows or underflows in fp32.
            return (self.center + outputs).clamp(-85.0, 85.0).exp()
        if self.quantiles:
            # Not `cumsum`, which adds in another order on a GPU, so that rounding may cross quantiles.
            outputs = torch.stack(list(accumulate(outputs.unbind(-1), torch.add)), -1)
        return self.center + self.scale * outputs

    def to_logits(self, probabilities: torch.Tensor) -> torch.Tensor:
        """Returns calibrated logits of the mean probabilities."""
        assert isinstance(self.temperature, torch.Tensor)
        return probabilities.clamp_min(1e-12).log() / self.temperature


class MemberBlock(nn.Module):
    """A hidden layer: one matrix that all members share, with vectors of each member (BatchEnsemble)."""

    def __init__(self, members: int, in_dim: int, out_dim: int, dropout: float, is_first: bool) -> None:
        super().__init__()
        self.linear = nn.Linear(in_dim, out_dim, bias=False)
        # Random signs in the first layer make the members differ; later layers begin equal.
        ones = torch.ones(members, in_dim)
        self.inputs = nn.Parameter(torch.randint(0, 2, ones.shape) * 2.0 - 1.0 if is_first else ones)
        self.outputs = nn.Parameter(torch.ones(members, out_dim))
        self.bias = nn.Parameter((torch.rand(members, out_dim) * 2 - 1) / math.sqrt(in_dim))
        self.dropout = nn.Dropout(dropout)

    def forward(self, x: torch.Tensor, effect: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Maps (batch, members or 1, in_dim) to (batch, members, out_dim); passes `effect` on to the head."""
        out = self.linear(x * self.inputs) * self.outputs + self.bias
        return self.dropout(torch.relu(out)), effect


class TabM(TableNetwork):
    """`members` networks over the numbers and categories of a table; the prediction is their mean.

    Args:
        edges: See `NumberEmbedding`; one entry per number.
        cardinalities: Number of ids of each category; id 0 stands for categories not in training rows.
        out_features: Outputs per row: classes, or one for a regression.
        members: Number of networks.
        width: Width of each hidden layer.
        depth: Number of hidden layers.
        number_width: Width of a number's embedding.
        category_width: Greatest width of a category's embedding.
        dropout: Probability of zeroing a hidden unit in training.
        unknown: Probability of training a category as unknown, so that id 0 is learned.
        center: Mean of a regression's label.
        scale: Standard deviation of a regression's label. Outputs are `center + scale * value`.
        averages: "values" averages outputs; "probabilities" averages class probabilities and returns logits.
        link: "log" for a positive mean; see `TableNetwork`.
        quantiles: Ascending probabilities of the label's quantiles, one output each; empty: `out_features`.

    Raises:
        ValueError: If an argument is out of range, or there is no input at all.
    """

    def __init__(
        self,
        edges: Sequence[Sequence[float]],
        cardinalities: Sequence[int],
        out_features: int,
        members: int = 8,
        width: int = 256,
        depth: int = 2,
        number_width: int = 12,
        category_width: int = 12,
        dropout: float = 0.3,
        unknown: float = 0.02,
        center: float = 0.0,
        scale: float = 1.0,
        averages: str = "values",
        link: str = "identity",
        quantiles: Sequence[float] = (),
    ) -> None:
        super().__init__(edges, cardinalities, unknown, center, scale, averages, link, quantiles)
        out_features = len(quantiles) or out_features
        check_sizes(out_features=out_features, members=members, width=width, depth=depth)
        check_sizes(number_width=number_width, category_width=category_width)
        check_dropout("dropout", dropout)
        self.numbers = NumberEmbedding(edges, number_width)
        self.embeddings = nn.ModuleList(nn.Embedding(n, min(n, category_width)) for n in cardinalities)
        self.effects = nn.ModuleList(nn.Embedding(n, out_features) for n in cardinalities if n > RARE_FROM)
        for n, table in zip(cardinalities, self.embeddings, strict=True):
            nn.init.normal_(table.weight, std=RARE_STD if n > RARE_FROM else STD)  # type: ignore[arg-type]
        for table in self.effects:
            nn.init.zeros_(table.weight)  # type: ignore[arg-type]
        in_dim = len(edges) * (number_width + 1) + sum(min(n, category_width) for n in cardinalities)
        widths = [in_dim, *[width] * depth]
        self.blocks = nn.ModuleList(
            MemberBlock(members, a, b, dropout, is_first=i == 0) for i, (a, b) in enumerate(pairwise(widths))
        )
        bound = 1 / math.sqrt(width)
        self.heads = nn.Parameter((torch.rand(members, out_features, width) * 2 - 1) * bound)
        biases = torch.zeros(members, out_features)
        self.biases = nn.Parameter(biases + self.initial_outputs if quantiles else biases)

    def forward(
        self, numbers: torch.Tensor, ids: torch.Tensor, offset: torch.Tensor | None = None
    ) -> torch.Tensor:
        """Maps (batch, M) numbers, NaN if missing, (batch, K) ids and an offset (batch,) to outputs.

        Returns:
            (batch, members, out_features) in training, otherwise the mean (batch, out_features).
        """
        x, effect = self._embed(numbers, ids, offset)
        for block in self.blocks:
            x, effect = block(x, effect)
        return self._predict(x, effect)

    def links(self) -> list[Link]:
        blocks = [Link(f"blocks.{i}", block, (f"blocks.{i}",)) for i, block in enumerate(self.blocks)]
        inputs = Link("inputs", self._embed, ("numbers", "embeddings", "effects"))
        parts = ("heads", "biases", *(["temperature"] if self.averages == "probabilities" else []))
        return [inputs, *blocks, Link("head", self._predict, parts)]

    def _embed(
        self, numbers: torch.Tensor, ids: torch.Tensor, offset: torch.Tensor | None = None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Returns the first block's input (batch, 1, in_dim), and what the head adds (batch, 1, outputs)."""
        ids = self.hide_some(ids)
        vectors = [self.numbers(numbers)] if numbers.shape[1] else []
        vectors += [table(ids[:, column]) for column, table in enumerate(self.embeddings)]
        effect = torch.zeros(len(ids), self.heads.shape[1], dtype=self.heads.dtype, device=ids.device)
        return torch.cat(vectors, 1)[:, None], self.add_effects(effect, ids, offset)[:, None]

    def _predict(self, x: torch.Tensor, effect: torch.Tensor) -> torch.Tensor:
        outputs = self.to_distances(torch.einsum("bkw,kow->bko", x, self.heads) + self.biases + effect)
        if self.quantiles and not self.training:
            # Average distances, not quantiles: rounded means of quantiles could cross.
            outputs = outputs.mean(1, keepdim=True)
        if self.training or self.averages == "values":
            outputs = self.to_label(outputs)
            return outputs if self.training else outputs.mean(1)
        return self.to_logits(outputs.float().softmax(2).mean(1))
