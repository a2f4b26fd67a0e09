"""A layer of several perceptrons, the experts, of which each token is computed by a few.

The experts' weights are stacked: one parameter holds those of all experts along its first dimension, so that
a rank which has some of the experts has a part of each parameter. Only what the router assigns is computed.
A token that no expert has a place for comes out as zeros, so that behind a residual connection it passes as
it is.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import replace
from difflib import get_close_matches
from typing import Any

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.nn import functional as F

from ringspark.models.experts.routing import ROUTERS, Routing, Rule, z_loss
from ringspark.models.reports import CountingLayer, add_counts, add_loss
from ringspark.models.whole_rows import WholeRows, read

# Small, so that at first all experts are about as probable (Fedus et al. 2021).
ROUTER_STD = 0.02

# `Rule` rounds the factor to millionths, so a smaller factor would become 0.
LEAST_FACTOR = 1e-6

Exchange = Callable[["Experts", torch.Tensor, list[int]], torch.Tensor]


class Experts(nn.Module):
    """Perceptrons of two layers, side by side.

    `up_weight` is (experts, mlp_dim, dim), and so on: each slice is laid out as that of an `nn.Linear`.
    """

    def __init__(self, num_experts: int, dim: int, mlp_dim: int) -> None:
        super().__init__()
        self.up_weight = nn.Parameter(torch.empty(num_experts, mlp_dim, dim))
        self.up_bias = nn.Parameter(torch.empty(num_experts, mlp_dim))
        self.activation = nn.GELU()
        self.down_weight = nn.Parameter(torch.empty(num_experts, dim, mlp_dim))
        self.down_bias = nn.Parameter(torch.empty(num_experts, dim))
        for weight, bias in ((self.up_weight, self.up_bias), (self.down_weight, self.down_bias)):
            # What `nn.Linear` does for each expert.
            bound = 1 / math.sqrt(weight.shape[-1])
            nn.init.uniform_(weight, -bound, bound)
            nn.init.uniform_(bias, -bound, bound)

    def forward(self, rows: torch.Tensor, sizes: Sequence[int]) -> torch.Tensor:
        """Maps (rows, dim) to (rows, dim); the first `sizes[0]` rows are those of the first expert here."""
        parts = torch.split(rows, list(sizes))
        # An expert without rows runs too: its gradient is zeros then, on any number of ranks.
        return torch.cat([self.run(part, own) for part, own in zip(parts, self.each(), strict=True)])

    def each(self) -> list[tuple[torch.Tensor, ...]]:
        """Returns the weights and biases of each expert here."""
        stacked = (self.up_weight, self.up_bias, self.down_weight, self.down_bias)
        # Unbound at once: a gradient for each expert by itself would have the size of all of them.
        return list(zip(*(parameter.unbind(0) for parameter in stacked), strict=True))

    def run(self, rows: torch.Tensor, weights: tuple[torch.Tensor, ...]) -> torch.Tensor:
        """Computes rows by one expert."""
        up, up_bias, down, down_bias = weights
        return F.linear(self.activation(F.linear(rows, up, up_bias)), down, down_bias)


class MixtureOfExperts(CountingLayer):
    """A mixture of experts: (batch, seq, dim) -> (batch, seq, dim), to be added to its input.

    In training it adds two losses to that of the network, see `reports.add_loss`: each row's balance loss and
    its z loss. In every mode it counts what the history shows: asked, dropped and load. Evaluation has no
    noise, and drops tokens as training does.

    Attributes:
        exchange: Has the experts compute rows that may be on other ranks; None: all experts are here.
        rows: Which tokens of a row are here; see `WholeRows`. Where a row is spread, each rank routes all of
            its tokens alike, and has the experts compute its own.
    """

    rows = WholeRows()

    def __init__(
        self,
        dim: int,
        mlp_dim: int,
        num_experts: int,
        router: str = "switch",
        capacity_factor: float | None = 1.25,
        min_capacity: int = 4,
        balance_weight: float = 0.01,
        z_weight: float = 0.001,
        jitter: float = 0.0,
        random_second: bool = False,
        causal: bool = False,
    ) -> None:
        """Checks the arguments and draws the weights.

        Args:
            dim: Width of the input and output.
            mlp_dim: Width inside each expert.
            num_experts: Number of experts.
            router: A name in `routing.ROUTERS`.
            capacity_factor: See `routing.Rule`; None drops no token.
            min_capacity: Places that each expert has at least in a row.
            balance_weight: Factor of the balance loss.
            z_weight: Factor of the z loss.
            jitter: In training the router's input is multiplied by numbers between 1 - jitter and 1 + jitter.
            random_second: In training the second choice of `gshard` is asked for by chance, see `Rule`.
            causal: Whether no token may know later ones of its row. Places are then given in their order.

        Raises:
            ValueError: An argument is out of range, or does not go with another one.
        """
        super().__init__()
        _check(num_experts, router, capacity_factor, min_capacity, causal)
        _check_numbers(dim, mlp_dim, balance_weight, z_weight, jitter)
        if random_second and router != "gshard":
            raise ValueError(
                f"random_second is for router 'gshard', whose tokens have two experts, got {router!r}"
            )
        self.num_experts, self.num_counts = num_experts, num_experts + 5
        self._route = ROUTERS[router]
        self._balance_weight, self._z_weight, self._jitter = balance_weight, z_weight, jitter
        self._random_second = random_second
        self._rule = Rule(capacity_factor=capacity_factor, min_capacity=min_capacity, in_order=causal)
        self._noisy = Rule(
            capacity_factor=capacity_factor,
            min_capacity=min_capacity,
            in_order=causal,
            random_second=random_second,
        )
        self.router = nn.Linear(dim, num_experts, bias=False)
        nn.init.normal_(self.router.weight, std=ROUTER_STD)
        self.experts = Experts(num_experts, dim, mlp_dim)
        self.exchange: Exchange | None = None

    def forward(self, x: torch.Tensor, real: torch.Tensor | None = None) -> torch.Tensor:
        """Returns the sum of the experts' weighted outputs for each token.

        Args:
            x: (batch, own tokens, dim); all tokens are a rank's own, but where `rows` are spread.
            real: (batch, seq) booleans, False for padding, which takes no place; None: all are tokens. Where
                `rows` are spread, they are those of whole rows, or what `WholeRows.told` returns.

        Raises:
            ValueError: Rows are spread, and `real` does not tell how long they are.
        """
        if torch.compiler.is_dynamo_compiling():
            # The number of rows of an expert is known only when it runs.
            eager: Any = torch.compiler.disable(self._forward)  # type: ignore[no-untyped-call]
            found: torch.Tensor = eager(x, real)
            return found
        return self._forward(x, real)

    def _forward(self, x: torch.Tensor, real: torch.Tensor | None) -> torch.Tensor:
        if real is None and self.rows.is_spread:
            raise ValueError(
                "a mixture of experts whose rows are spread over ranks routes whole rows, and was not told "
                "how long they are; call it with what WholeRows.told returns"
            )
        real, seq = read(real, x)
        if real is None:
            real = torch.ones((x.shape[0], seq), dtype=torch.bool, device=x.device)
        rule, logits = self._noisy if self.training else self._rule, self._logits(x)
        if self.rows.is_spread:
            logits = self.rows.joined(logits, 1, seq)
            # Every rank routes the same tokens, and must draw the same numbers for them.
            own = torch.empty((*x.shape[:2], 1), dtype=logits.dtype, device=x.device)
            rule = replace(rule, chances=lambda _: self.rows.joined(torch.rand_like(own), 1, seq))
        routing = self._route(logits, real, rule)
        self._report(routing, logits, real)
        if self.rows.is_spread:
            routing = self._of_own(routing, seq)
        flat = x.reshape(-1, x.shape[-1])  # (batch * seq, dim)
        out = self._everywhere(flat, routing) if _is_exporting() else self._dealt(flat, routing, real.numel())
        return out.view(x.shape).to(x.dtype)

    def _logits(self, x: torch.Tensor) -> torch.Tensor:
        # In fp32: the softmax of 16-bit logits would not tell near experts apart (Fedus et al. 2021).
        kind = x.device.type
        with torch.autocast(kind, enabled=False) if kind != "meta" else nullcontext():
            x = x.to(_wide(x))
            if self.training and self._jitter:
                x = x * torch.empty_like(x).uniform_(1 - self._jitter, 1 + self._jitter)
            return F.linear(x, self.router.weight.to(x.dtype))

    def _of_own(self, routing: Routing, seq: int) -> Routing:
        """Returns the assignments of this rank's tokens, by their places here; the others get no expert."""
        own = self.rows.own(torch.arange(seq, device=routing.tokens.device), 0)
        places = torch.full((seq,), -1, device=own.device).index_copy(
            0, own, torch.arange(len(own), device=own.device)
        )
        rows, tokens = routing.tokens // seq, places[routing.tokens % seq]
        return replace(
            routing,
            tokens=rows * len(own) + tokens,
            experts=routing.experts.where(tokens >= 0, self.num_experts),
        )

    def _dealt(self, flat: torch.Tensor, routing: Routing, num_routed: int) -> torch.Tensor:
        """Computes each assignment by its expert, and adds up by token in fp32.

        Args:
            num_routed: Number of tokens that were routed; of rows that are spread, more than this rank's.
        """
        order = routing.experts.argsort(stable=True)
        sizes = self._sizes(routing.experts, flat.shape[0], num_routed)
        order = order[: sum(sizes)]  # behind them are those without an expert
        tokens = routing.tokens[order]
        rows = flat.index_select(0, tokens)
        computed = (
            self.experts(rows, sizes) if self.exchange is None else self.exchange(self.experts, rows, sizes)
        )
        weighted = computed * routing.weights[order][:, None]
        return torch.zeros_like(flat, dtype=weighted.dtype).index_add(0, tokens, weighted)

    def _sizes(self, experts: torch.Tensor, num_own: int, num_routed: int) -> list[int]:
        """Returns the number of assignments of own tokens to each expert."""
        if experts.is_meta or isinstance(experts, FakeTensor):
            # A plan of memory or time knows no numbers, and takes an even load without drops.
            each, more = divmod(len(experts) * num_own // num_routed, self.num_experts)
            return [each + (number < more) for number in range(self.num_experts)]
        numbers = torch.arange(self.num_experts, device=experts.device)
        counts: list[int] = (experts[:, None] == numbers).sum(0).tolist()
        return counts

    def _everywhere(self, flat: torch.Tensor, routing: Routing) -> torch.Tensor:
        """Computes every token by every expert: the same result by shapes that depend on no number."""
        places = routing.tokens * (self.num_experts + 1) + routing.experts
        num_tokens = flat.shape[0]  # not `len`, which an export takes for a constant
        factors = routing.weights.new_zeros(num_tokens * (self.num_experts + 1))
        factors = factors.index_add(0, places, routing.weights).view(num_tokens, self.num_experts + 1)
        out = torch.zeros_like(flat, dtype=factors.dtype)
        for number, weights in enumerate(self.experts.each()):
            out = out + self.experts.run(flat, weights) * factors[:, number, None]
        return out

    def _report(self, routing: Routing, logits: torch.Tensor, real: torch.Tensor) -> None:
        z = z_loss(logits, real)
        if self.training:
            add_loss(self._balance_weight * routing.balance + self._z_weight * z)
        with torch.no_grad():
            rows = torch.full_like(z, 1.0)
            told = [routing.asked, routing.dropped, routing.balance, z, rows]
            counts = torch.cat([routing.load, torch.stack(told, 1)], 1)  # (batch, num_counts)
            add_counts(self, counts.sum(0))

    @staticmethod
    def numbers(totals: Sequence[torch.Tensor]) -> dict[str, float]:
        """Returns the numbers of the history over all mixtures of a network.

        - `dropped_share`: Share of what was asked for that had no place.
        - `expert_balance`: Share of the busiest expert times the number of experts, in the mixture where this
          is highest; 1 is even.
        - `balance_loss`, `z_loss`: Means over rows and mixtures, before their factors.
        """
        ends = torch.stack([counts[-5:] for counts in totals]).sum(0)
        asked, dropped, balance, z, rows = ends.tolist()
        highest = [counts[:-5].max() / counts[:-5].sum() * (len(counts) - 5) for counts in totals]
        return {
            "dropped_share": dropped / asked if asked else math.nan,
            "expert_balance": float(torch.stack(highest).max()),
            "balance_loss": balance / rows if rows else math.nan,
            "z_loss": z / rows if rows else math.nan,
        }


def _wide(x: torch.Tensor) -> torch.dtype:
    """Returns the dtype to route in: fp32, or that of `x` if it has more digits."""
    return torch.promote_types(x.dtype, torch.float32)


def _check(
    num_experts: int, router: str, capacity_factor: float | None, min_capacity: int, causal: bool
) -> None:
    if router not in ROUTERS:
        near = get_close_matches(str(router), ROUTERS, n=1)
        hint = f"; did you mean {near[0]!r}?" if near else ""
        raise ValueError(f"router must be one of {', '.join(ROUTERS)}, got {router!r}{hint}")
    least = 2 if router == "gshard" else 1
    if num_experts < least:
        raise ValueError(f"num_experts must be at least {least} for router {router!r}, got {num_experts}")
    if causal and router == "expert_choice":
        raise ValueError(
            "router 'expert_choice' has later tokens of a row decide which experts earlier ones get, and a "
            "causal network must not know them; take 'switch' or 'gshard'"
        )
    if capacity_factor is None and router == "expert_choice":
        raise ValueError(
            "router 'expert_choice' needs a capacity_factor, the mean number of experts of a token; got None"
        )
    if capacity_factor is not None and not LEAST_FACTOR <= capacity_factor < math.inf:
        raise ValueError(
            f"capacity_factor must be at least {LEAST_FACTOR:f}, or None to drop no tokens, got "
            f"{capacity_factor}"
        )
    if min_capacity < 1:
        raise ValueError(f"min_capacity must be at least 1, got {min_capacity}")


def _check_numbers(dim: int, mlp_dim: int, balance_weight: float, z_weight: float, jitter: float) -> None:
    for name, size in (("dim", dim), ("mlp_dim", mlp_dim)):
        if size < 1:
            raise ValueError(f"{name} must be at least 1, got {size}")
    for name, weight in (("balance_weight", balance_weight), ("z_weight", z_weight)):
        if not 0 <= weight < math.inf:
            raise ValueError(f"{name} must be at least 0, got {weight}")
    if not 0 <= jitter < 1:
        raise ValueError(f"jitter must be at least 0 and below 1, got {jitter}")


def _is_exporting() -> bool:
    # torch 2.6 cannot tell an export from a compiled call.
    asked = getattr(torch.compiler, "is_exporting", torch.compiler.is_compiling)
    return bool(asked())
