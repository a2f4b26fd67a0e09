"""TabPack: a pack of networks for a table that train side by side, each with its own hyperparameters.

The members share nothing. After each epoch the training calls `choose_on`: every member keeps its best
weights so far, and members that together predict held-out rows best weigh more in the mean, as in "TabPack"
(2026) and in Caruana et al. 2004, "Ensemble Selection from Libraries of Models". Numbers go through
piecewise-linear embeddings (Gorishniy, Rubachev and Babenko 2022, "On Embeddings for Numerical Features in
Tabular Deep Learning").
"""

import math
from collections.abc import Callable, Iterable, Sequence
from itertools import pairwise
from typing import TYPE_CHECKING

import torch
from torch import nn
from torch.nn import functional

from ringspark.estimators.training.objective.losses import PinballLoss, RowLoss, resolve_loss
from ringspark.extras.tables.tabm import IGNORED, RARE_FROM, RARE_STD, STD, NumberBins, TableNetwork
from ringspark.models.checks import check_dropout, check_sizes

if TYPE_CHECKING:
    from ringspark.estimators.collectives import Collective
    from ringspark.estimators.training.feed import Batch

# A member with much dropout underfits clean labels, one with little overfits noisy ones; a slow one suits few
# rows.
DROPOUTS = (0.0, 0.0, 0.1, 0.1, 0.2, 0.3, 0.4, 0.5)
RATES = (1.0, 0.3, 1.0, 0.3, 1.0, 1.0, 0.5, 1.0)
UNITS = 32
"""Units of each member for constrained numbers."""


class Packed(nn.Module):
    """Present weights and best weights of all members, (members, ...). Each member has its own learning rate.

    A member's parameters are its weights divided by the member's rate. Adam's step does not depend on the
    gradient's scale, so a step changes the weights in proportion to the rate.
    """

    def __init__(self, rates: torch.Tensor, **values: torch.Tensor) -> None:
        super().__init__()
        self.register_buffer("rates", rates, persistent=False)
        self.register_buffer("is_chosen", torch.tensor(False))
        self.names = list(values)
        # Whether to use the present weights in evaluation, too.
        self.is_live = False
        for name, value in values.items():
            self.register_parameter(name, nn.Parameter(value / self._spread(rates, value)))
            self.register_buffer(f"best_{name}", value.clone())

    @staticmethod
    def _spread(rates: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
        return rates.view(-1, *[1] * (value.dim() - 1))

    def get(self, name: str) -> torch.Tensor:
        """Returns the weight `name`: the present values in training, else the best values of each member."""
        value: torch.Tensor = getattr(self, name)
        present = value * self._spread(self.rates, value)  # type: ignore[arg-type]
        if self.training or self.is_live:
            return present
        return torch.where(self.is_chosen, getattr(self, f"best_{name}"), present)  # type: ignore[arg-type]

    @torch.no_grad()
    def keep(self, better: torch.Tensor) -> None:
        """Stores present weights as best weights, for each member whose entry in `better` is True."""
        for name in self.names:
            value, best = getattr(self, name), getattr(self, f"best_{name}")
            present = value * self._spread(self.rates, value)  # type: ignore[arg-type]
            best.copy_(torch.where(self._spread(better, value), present, best))
        self.is_chosen.fill_(True)  # type: ignore[operator]


class PackedNumbers(Packed):
    """Piecewise-linear embeddings of M numbers for each member."""

    def __init__(self, rates: torch.Tensor, numbers: int, features: int, width: int) -> None:
        shape = (len(rates), numbers, features, width)
        super().__init__(
            rates, weight=torch.randn(shape) * 0.15, bias=torch.zeros(len(rates), 1, numbers, width)
        )

    def forward(self, features: torch.Tensor) -> torch.Tensor:
        """Maps (batch, M, features) to (members, batch, M * width)."""
        embedded = torch.einsum("bmn,kmnd->kbmd", features, self.get("weight")) + self.get("bias")
        return torch.relu(embedded).flatten(2)


class PackedTable(Packed):
    """An embedding table for each member."""

    def __init__(self, rates: torch.Tensor, size: int, width: int, std: float) -> None:
        super().__init__(rates, weight=torch.randn(len(rates), size, width) * std)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        """Maps (batch,) ids to (members, batch, width)."""
        return self.get("weight")[:, ids]


class PackedLinear(Packed):
    """A linear layer for each member."""

    def __init__(self, rates: torch.Tensor, in_dim: int, out_dim: int) -> None:
        bound, members = 1 / math.sqrt(in_dim), len(rates)
        super().__init__(
            rates,
            weight=(torch.rand(members, in_dim, out_dim) * 2 - 1) * bound,
            bias=(torch.rand(members, 1, out_dim) * 2 - 1) * bound,
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Maps (members, batch, in_dim) to (members, batch, out_dim)."""
        return torch.baddbmm(self.get("bias"), x, self.get("weight"))


class PackedBlock(PackedLinear):
    """A linear layer, ReLU and dropout for each member."""

    def __init__(self, rates: torch.Tensor, dropouts: torch.Tensor, in_dim: int, out_dim: int) -> None:
        super().__init__(rates, in_dim, out_dim)
        self.register_buffer("dropouts", dropouts[:, None, None], persistent=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out = torch.relu(super().forward(x))
        if self.training:
            assert isinstance(self.dropouts, torch.Tensor)
            out = out * (torch.rand_like(out) >= self.dropouts) / (1 - self.dropouts)
        return out


class MonotoneUnits(Packed):
    """Units that rise with the features of each constrained number; the free network shifts and gates them.

    Runje and Shankaranarayana 2023, "Constrained Monotonic Neural Networks": weights of one sign on the path
    of a constrained number, and units of both curvatures. Here this path is one layer, and the free network
    does not see the constrained numbers. A missing number is exempt.

    Args:
        rates: See `Packed`.
        signs: For each constrained number, 1 if the prediction rises with it, -1 if it falls.
        features: Number of features per number; they rise with the number.
        width: Width of the free network.
    """

    def __init__(self, rates: torch.Tensor, signs: Sequence[int], features: int, width: int) -> None:
        shape = (len(rates), len(signs) * features, UNITS)
        super().__init__(rates, weight=torch.randn(shape) * 0.15, bias=torch.randn(len(rates), 1, UNITS))
        self.conditions = PackedLinear(rates, width, 2 * UNITS)
        self.register_buffer("signs", torch.tensor(signs, dtype=torch.float32)[:, None], persistent=False)

    def forward(self, features: torch.Tensor, free: torch.Tensor) -> torch.Tensor:
        """Maps features (batch, numbers, features) and (members, batch, width) to (members, batch, 1)."""
        assert isinstance(self.signs, torch.Tensor)
        signed = (features * self.signs).flatten(1)
        shifts, gates = self.conditions(free).chunk(2, 2)
        convex, concave = (signed @ self.get("weight").abs() + self.get("bias") + shifts).chunk(2, 2)
        units = torch.cat([convex.clamp_min(0), concave.clamp_max(0)], 2)
        out: torch.Tensor = (functional.softplus(gates) * units).mean(2, keepdim=True)
        return out


class TabPack(TableNetwork):
    """Independent networks over the numbers and categories of a table; the prediction is a weighted mean.

    Args:
        dropouts: For each member, the probability of zeroing a hidden unit in training.
        rates: For each member, a factor of the learning rate, above 0.
        edges, cardinalities, out_features, width, depth, number_width, category_width, unknown, center,
            scale, averages, link, quantiles: See `TabM`.
        monotone: For each number, 1 if the value or the logit of class 1 must not fall when the number rises,
            -1 if it must not rise, or 0. Empty: all 0.

    Raises:
        ValueError: If an argument is out of range, or there is no input at all.
    """

    def __init__(
        self,
        edges: Sequence[Sequence[float]],
        cardinalities: Sequence[int],
        out_features: int,
        dropouts: Sequence[float] = DROPOUTS,
        rates: Sequence[float] = RATES,
        width: int = 256,
        depth: int = 2,
        number_width: int = 12,
        category_width: int = 12,
        unknown: float = 0.02,
        center: float = 0.0,
        scale: float = 1.0,
        averages: str = "values",
        link: str = "identity",
        quantiles: Sequence[float] = (),
        monotone: Sequence[int] = (),
    ) -> None:
        super().__init__(edges, cardinalities, unknown, center, scale, averages, link, quantiles)
        out_features = len(quantiles) or out_features
        check_sizes(out_features=out_features, width=width, depth=depth, members=len(rates))
        check_sizes(number_width=number_width, category_width=category_width)
        for dropout in dropouts:
            check_dropout("dropouts", dropout)
        if len(dropouts) != len(rates) or min(rates) <= 0:
            raise ValueError("dropouts and rates must have one number per member, and rates must be above 0")
        shares = torch.tensor(rates)
        self.bins = NumberBins(edges)
        # Tables without a column of this type have no weights for it.
        signs = list(monotone) or [0] * len(edges)
        if (
            len(signs) != len(edges)
            or not {-1, 0, 1}.issuperset(signs)
            or (any(signs) and out_features > 2 and not quantiles)
        ):
            raise ValueError("monotone must have -1, 0 or 1 per number, and at most two classes")
        self.free = [number for number, sign in enumerate(signs) if not sign]
        self.bound = [number for number, sign in enumerate(signs) if sign]
        free = len(self.free)
        self.numbers = PackedNumbers(shares, free, self.bins.features, number_width) if free else None
        self.embeddings = nn.ModuleList(
            PackedTable(shares, n, min(n, category_width), RARE_STD if n > RARE_FROM else STD)
            for n in cardinalities
        )
        self.effects = nn.ModuleList(
            PackedTable(shares, n, out_features, 0.0) for n in cardinalities if n > RARE_FROM
        )
        widths = [
            free * (number_width + 1) + len(self.bound) + sum(min(n, category_width) for n in cardinalities),
            *[width] * depth,
        ]
        self.hidden = nn.Sequential(
            *(PackedBlock(shares, torch.tensor(dropouts), *pair) for pair in pairwise(widths))
        )
        self.head = PackedLinear(shares, width, out_features)
        if quantiles:
            with torch.no_grad():
                self.head.bias += self.initial_outputs / shares[:, None, None]  # type: ignore[operator]
        # Without the rank and the flag of a missing number.
        rising, bound = self.bins.features - 2, [sign for sign in signs if sign]
        self.units = MonotoneUnits(shares, bound, rising, width) if bound else None
        self.register_buffer("shares", torch.full((len(rates),), 1 / len(rates)))

    def forward(
        self, numbers: torch.Tensor, ids: torch.Tensor, offset: torch.Tensor | None = None
    ) -> torch.Tensor:
        """Maps (batch, M) numbers, NaN if missing, (batch, K) ids and an offset (batch,) to outputs.

        Returns:
            (batch, members, out_features) in training, otherwise the weighted mean (batch, out_features).
        """
        outputs = self._outputs(numbers, ids, offset)
        if self.training:
            return self.to_label(outputs.transpose(0, 1))
        predictions = self._predictions(outputs)
        if self.is_log or offset is not None:
            # Autocast would round the factors of `einsum` to 16 bits, and an offset may exceed the scale.
            mean = (predictions * self.shares[:, None, None]).sum(0)  # type: ignore[index]
        else:
            mean = torch.einsum("kbo,k->bo", predictions, self.shares)
        if self.averages == "probabilities":
            return self.to_logits(mean)
        return mean if self.is_log else self.to_label(mean)

    @torch.no_grad()
    def candidates(
        self, numbers: torch.Tensor, ids: torch.Tensor, offset: torch.Tensor | None = None
    ) -> torch.Tensor:
        """Returns each member's predictions, first with its best weights, then with its present weights.

        Returns:
            (2 * members, batch, out_features): probabilities, positive means, standardized values of a
            regression, or distances of quantiles (`to_distances`).
        """
        inputs = (numbers, ids, offset)
        if not self.head.is_chosen:
            # There are no best weights yet, so both candidates are the present weights.
            return self._predictions(self._outputs(*inputs)).repeat(2, 1, 1)
        found = []
        packed = [module for module in self.modules() if isinstance(module, Packed)]
        for is_live in (False, True):
            for module in packed:
                module.is_live = is_live
            found.append(self._predictions(self._outputs(*inputs)))
        for module in packed:
            module.is_live = False
        return torch.cat(found)

    @torch.no_grad()
    def choose_on(
        self, batches: "Iterable[Batch]", data: "Collective", *, is_classes: bool, loss: str = ""
    ) -> None:
        """Chooses members by squared errors of values, or of class probabilities (Brier). Runs on every rank.

        Positive means are compared by their deviance, and quantiles by their pinball loss. `batches` has this
        rank's held-out rows; `data` are the ranks with the other held-out rows.
        """
        assert isinstance(self.shares, torch.Tensor)
        if self.quantiles or self.is_log:
            device = self.shares.device
            judge = PinballLoss(self.quantiles, device) if self.quantiles else resolve_loss(loss)
            self._choose_by(judge, batches, data)
            return
        members = len(self.shares)
        # A rank without rows takes part, too.
        sums = torch.zeros(2 * members, 2 * members, dtype=torch.float64, device=self.shares.device)
        for batch in batches:
            if not batch.num_rows:
                continue
            found = self.candidates(*batch.inputs).double()
            label = batch.labels[0].reshape(len(batch.labels[0]), -1)
            weight = torch.ones_like(label[:, 0]) if batch.weight is None else batch.weight
            if is_classes:
                weight = weight * (label[:, 0] != IGNORED)
                wanted = functional.one_hot(label[:, 0].long().clamp_min(0), found.shape[2]).double()
            else:
                wanted = (label.double() - self.center) / self.scale
            errors = found - wanted
            sums += torch.einsum("cbo,dbo->cd", errors * weight.double()[None, :, None], errors)
        self.choose_members(data.all_reduce(sums))

    @torch.no_grad()
    def choose_members(self, products: torch.Tensor) -> None:
        """Keeps the better weights of each member, and sets the members' shares in the mean.

        Args:
            products: Sums over held-out rows of the products of two candidates' errors, in the order of
                `candidates`: (2 * members, 2 * members).
        """
        kept = self._keep_better(products.diagonal())
        self._set_shares(choose_greedily(squared_error(products[kept][:, kept]), kept))

    def _choose_by(self, loss: RowLoss, batches: "Iterable[Batch]", data: "Collective") -> None:
        """Chooses members by a loss; keeps their predictions for all held-out rows in memory."""
        assert isinstance(self.shares, torch.Tensor)
        empty = self.shares.new_zeros(0)
        # A rank without rows takes part, too.
        parts = [(self.shares.new_zeros(2 * len(self.shares), 0, len(self.quantiles) or 1), empty, empty)]
        for batch in batches:
            if batch.num_rows:
                given = batch.labels[0].flatten()
                weight = torch.ones_like(given) if batch.weight is None else batch.weight
                parts.append((self.candidates(*batch.inputs), given, weight))
        predictions, labels, weights = zip(*parts, strict=True)
        found, label, weight = torch.cat(predictions, 1), torch.cat(labels), torch.cat(weights)

        def sum_losses(predicted: Iterable[torch.Tensor]) -> torch.Tensor:
            """Returns the loss of each prediction, summed over the rows of all ranks."""
            values = (self.to_label(each) if self.quantiles else each for each in predicted)
            return data.all_reduce(torch.stack([(loss(v, label).double() * weight).sum() for v in values]))

        kept = self._keep_better(sum_losses(found))
        found = found[kept]

        def score(counts: torch.Tensor) -> torch.Tensor:
            # Autocast would round the factors of `einsum` to 16 bits.
            together = (found * counts.to(found.dtype)[:, None, None]).sum(0)
            return sum_losses((together + each) / (float(counts.sum()) + 1) for each in found)

        self._set_shares(choose_greedily(score, kept))

    def _keep_better(self, errors: torch.Tensor) -> torch.Tensor:
        """Keeps the better weights of each member; returns the members' places in `candidates`.

        Args:
            errors: An error of each candidate, in the order of `candidates`: (2 * members,).
        """
        members = len(errors) // 2
        better = errors[members:] < errors[:members]
        if not bool(self.head.is_chosen):
            better = torch.ones_like(better)
        for module in self.modules():
            if isinstance(module, Packed):
                module.keep(better)
        return torch.arange(members, device=better.device) + members * better

    def _set_shares(self, shares: torch.Tensor) -> None:
        # Half an equal share each, because the choice also follows the noise of the held-out rows.
        self.shares.copy_((shares + 1 / len(shares)) / 2)  # type: ignore[operator]

    def _outputs(
        self, numbers: torch.Tensor, ids: torch.Tensor, offset: torch.Tensor | None = None
    ) -> torch.Tensor:
        """Returns the members' outputs, (members, batch, out_features), before scaling and averaging."""
        ids = self.hide_some(ids)
        members = len(self.shares)  # type: ignore[arg-type]
        parts = []
        if numbers.shape[1]:
            features, ranks = self.bins(numbers)
        if self.units is not None:
            bound, features, ranks = features[:, self.bound], features[:, self.free], ranks[:, self.free]
            parts.append(bound[:, :, -1].expand(members, -1, -1))  # whether it is missing
        if self.numbers is not None:
            parts += [self.numbers(features), ranks.expand(members, -1, -1)]
        parts += [table(ids[:, column]) for column, table in enumerate(self.embeddings)]
        hidden = self.hidden(torch.cat(parts, 2))
        out = self.head(hidden)
        if self.units is not None:
            rising = torch.cat([bound[:, :, :-3], bound[:, :, -2:-1]], 2)
            # To the lowest quantile, from which the others have a distance, or to the last logit.
            places = (0, out.shape[2] - 1) if self.quantiles else (out.shape[2] - 1, 0)
            out = out + functional.pad(self.units(rising, hidden), places)
        return self.to_distances(self.add_effects(out, ids, offset))

    def _predictions(self, outputs: torch.Tensor) -> torch.Tensor:
        if self.averages == "probabilities":
            return outputs.softmax(2)
        return self.to_label(outputs) if self.is_log else outputs


def squared_error(products: torch.Tensor) -> Callable[[torch.Tensor], torch.Tensor]:
    """Returns a score for `choose_greedily`, from sums over rows of the products of two members' errors."""

    def score(counts: torch.Tensor) -> torch.Tensor:
        errors = counts @ products @ counts + 2 * products @ counts + products.diagonal()
        return errors / (counts.sum() + 1) ** 2

    return score


def choose_greedily(
    score: Callable[[torch.Tensor], torch.Tensor], members: torch.Tensor, rounds: int = 50
) -> torch.Tensor:
    """Returns each member's share in a mean prediction with a small error.

    Adds one member to the mean per round, possibly one that was added before, until the error stops falling
    (Caruana et al. 2004).

    Args:
        score: How often each member is in the mean -> errors of the means with one more of each member.
        members: A tensor with one entry per member, on the device of the errors.
    """
    counts = torch.zeros(len(members), dtype=torch.float64, device=members.device)
    best = math.inf
    for _ in range(rounds):
        error, member = score(counts).min(0)
        if float(error) >= best * (1 - 1e-6):
            break
        best = float(error)
        counts[member] += 1
    return counts / counts.sum() if best < math.inf else torch.full_like(counts, 1 / len(counts))
