"""A mixture of experts: several perceptrons (experts), of which only a few compute each token.

The experts' weights are stacked along the first dimension, which expert parallelism shards.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import replace
from inspect import signature
from typing import Any

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.nn import functional as F

from ringspark.extras.experts.routing import ROUTERS, CapacityRule, Routing, z_loss
from ringspark.models.checks import check_choice, check_sizes, suggest
from ringspark.models.reports import CountingLayer, add_counts, add_loss
from ringspark.models.whole_rows import WholeRows, read

# Small, so that all experts start about equally probable (Fedus et al. 2021).
ROUTER_STD = 0.02

# `CapacityRule` rounds the factor to millionths, so a smaller factor would become 0.
LEAST_FACTOR = 1e-6

Dispatch = Callable[["Experts", torch.Tensor, list[int]], torch.Tensor]


class Experts(nn.Module):
    """Two-layer perceptrons with stacked weights; each expert's slice has the layout of `nn.Linear`."""

    def __init__(self, num_experts: int, dim: int, mlp_dim: int) -> None:
        super().__init__()
        self.up_weight = nn.Parameter(torch.empty(num_experts, mlp_dim, dim))
        self.up_bias = nn.Parameter(torch.empty(num_experts, mlp_dim))
        self.activation = nn.GELU()
        self.down_weight = nn.Parameter(torch.empty(num_experts, dim, mlp_dim))
        self.down_bias = nn.Parameter(torch.empty(num_experts, dim))
        for weight, bias in ((self.up_weight, self.up_bias), (self.down_weight, self.down_bias)):
            # As `nn.Linear` initializes each expert.
            bound = 1 / math.sqrt(weight.shape[-1])
            nn.init.uniform_(weight, -bound, bound)
            nn.init.uniform_(bias, -bound, bound)

    def forward(self, rows: torch.Tensor, sizes: Sequence[int]) -> torch.Tensor:
        """Maps (rows, dim) to (rows, dim).

        Rows are ordered by expert: the first `sizes[0]` rows belong to this rank's first expert, and so on.
        """
        chunks = torch.split(rows, list(sizes))
        # An expert without rows runs too, so its gradient is zeros on any number of ranks.
        return torch.cat([self.run(chunk, own) for chunk, own in zip(chunks, self.each(), strict=True)])

    def each(self) -> list[tuple[torch.Tensor, ...]]:
        stacked = (self.up_weight, self.up_bias, self.down_weight, self.down_bias)
        # One `unbind`: indexing would make a gradient of the size of all experts for each expert.
        return list(zip(*(parameter.unbind(0) for parameter in stacked), strict=True))

    def run(self, rows: torch.Tensor, weights: tuple[torch.Tensor, ...]) -> torch.Tensor:
        up, up_bias, down, down_bias = weights
        return F.linear(self.activation(F.linear(rows, up, up_bias)), down, down_bias)


class MixtureOfExperts(CountingLayer):
    """A mixture of experts: (batch, seq, dim) -> (batch, seq, dim). The caller adds the output to the input.

    In training, the layer adds each row's balance loss and z loss to the network's loss. In evaluation, the
    router gets no noise. Experts drop tokens beyond their capacity; a token without an expert gets zeros.

    Attributes:
        dispatch: Sends rows to experts on other ranks and returns the experts' outputs. None if this rank has
            all experts.
        rows: Access to a row's tokens, see `WholeRows`. If context parallelism spreads a row over ranks, each
            rank computes the routing of all tokens of the row.
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
        """Initializes the layer.

        Args:
            dim: Width of the input and output.
            mlp_dim: Width inside each expert.
            num_experts: Number of experts.
            router: A name in `routing.ROUTERS`.
            capacity_factor: See `routing.CapacityRule`; None drops no token.
            min_capacity: Smallest capacity of an expert per row.
            balance_weight: Factor of the balance loss in the training loss.
            z_weight: Factor of the z loss in the training loss.
            jitter: In training, the router's input is multiplied by random numbers between 1 - jitter and 1 +
                jitter.
            random_second: Whether router `gshard` requests a token's second expert at random in training;
                see `routing.CapacityRule`.
            causal: Whether the routing of a token must not depend on later tokens of the row. If so, earlier
                tokens get capacity first.
        """
        super().__init__()
        _check_router(num_experts, router, capacity_factor, causal, random_second)
        check_sizes(dim=dim, mlp_dim=mlp_dim, min_capacity=min_capacity)
        for name, weight in (("balance_weight", balance_weight), ("z_weight", z_weight)):
            if not 0 <= weight < math.inf:
                raise ValueError(f"{name} must be at least 0, got {weight}")
        if not 0 <= jitter < 1:
            raise ValueError(f"jitter must be at least 0 and below 1, got {jitter}")
        self.num_experts, self.num_counts = num_experts, num_experts + 5
        self._route = ROUTERS[router]
        self._balance_weight, self._z_weight, self._jitter = balance_weight, z_weight, jitter
        self._rule = CapacityRule(capacity_factor=capacity_factor, min_capacity=min_capacity, in_order=causal)
        self._training_rule = replace(self._rule, random_second=random_second)
        self.router = nn.Linear(dim, num_experts, bias=False)
        nn.init.normal_(self.router.weight, std=ROUTER_STD)
        self.experts = Experts(num_experts, dim, mlp_dim)
        self.dispatch: Dispatch | None = None

    def forward(self, x: torch.Tensor, real: torch.Tensor | None = None) -> torch.Tensor:
        """Returns the sum of the experts' weighted outputs for each token.

        Args:
            x: (batch, tokens of this rank, dim).
            real: (batch, seq) booleans over all tokens of the rows; False for padding, which uses no
                capacity. None if there is no padding. Context parallelism needs the result of
                `WholeRows.told` instead.
        """
        if torch.compiler.is_dynamo_compiling():
            # The number of rows per expert is known only at run time.
            eager: Any = torch.compiler.disable(self._forward)  # type: ignore[no-untyped-call]
            found: torch.Tensor = eager(x, real)
            return found
        return self._forward(x, real)

    def _forward(self, x: torch.Tensor, real: torch.Tensor | None) -> torch.Tensor:
        if real is None and self.rows.is_spread:
            raise ValueError(
                "a mixture of experts with sequence-sharded rows needs the length of whole rows; pass "
                "the result of WholeRows.told as the argument `real`"
            )
        real, seq = read(real, x)
        if real is None:
            real = torch.ones((x.shape[0], seq), dtype=torch.bool, device=x.device)
        rule, logits = self._training_rule if self.training else self._rule, self._logits(x)
        if self.rows.is_spread:
            logits = self.rows.joined(logits, 1, seq)
            # Every rank routes the same tokens, so it must draw the same numbers for them.
            own = torch.empty((*x.shape[:2], 1), dtype=logits.dtype, device=x.device)
            rule = replace(rule, chances=lambda _: self.rows.joined(torch.rand_like(own), 1, seq))
        routing = self._route(logits, real, rule)
        self._report(routing, logits, real)
        if self.rows.is_spread:
            routing = self._select_own(routing, seq)
        flat = x.reshape(-1, x.shape[-1])  # (batch * seq, dim)
        # torch 2.6 cannot distinguish an export from a compiled call.
        if getattr(torch.compiler, "is_exporting", torch.compiler.is_compiling)():
            out = self._compute_all(flat, routing)
        else:
            out = self._compute_assigned(flat, routing, real.numel())
        return out.view(x.shape).to(x.dtype)

    def _logits(self, x: torch.Tensor) -> torch.Tensor:
        # At least in fp32: a softmax of 16-bit logits cannot separate similar experts (Fedus et al. 2021).
        device_type = x.device.type
        with torch.autocast(device_type, enabled=False) if device_type != "meta" else nullcontext():
            x = x.to(torch.promote_types(x.dtype, torch.float32))
            if self.training and self._jitter:
                x = x * torch.empty_like(x).uniform_(1 - self._jitter, 1 + self._jitter)
            return F.linear(x, self.router.weight.to(x.dtype))

    def _select_own(self, routing: Routing, seq: int) -> Routing:
        """Renumbers the tokens by their places on this rank; tokens of other ranks get no expert."""
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

    def _compute_assigned(self, flat: torch.Tensor, routing: Routing, num_routed: int) -> torch.Tensor:
        order = routing.experts.argsort(stable=True)
        sizes = self._sizes(routing.experts, flat.shape[0], num_routed)
        order = order[: sum(sizes)]  # assignments without an expert are last
        tokens = routing.tokens[order]
        rows = flat.index_select(0, tokens)
        dispatch = self.dispatch or Experts.__call__
        weighted = dispatch(self.experts, rows, sizes) * routing.weights[order][:, None]
        return torch.zeros_like(flat, dtype=weighted.dtype).index_add(0, tokens, weighted)

    def _sizes(self, experts: torch.Tensor, num_own: int, num_routed: int) -> list[int]:
        if experts.is_meta or isinstance(experts, FakeTensor):
            # The memory planner has no values, and assumes an even load without drops.
            each, more = divmod(len(experts) * num_own // num_routed, self.num_experts)
            return [each + (number < more) for number in range(self.num_experts)]
        numbers = torch.arange(self.num_experts, device=experts.device)
        counts: list[int] = (experts[:, None] == numbers).sum(0).tolist()
        return counts

    def _compute_all(self, flat: torch.Tensor, routing: Routing) -> torch.Tensor:
        """Computes every token with every expert, so that no shape depends on a value, for torch.export."""
        places = routing.tokens * (self.num_experts + 1) + routing.experts
        num_tokens = flat.shape[0]  # not `len`, which would be a constant of an exported program
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
            totals = torch.stack([routing.asked, routing.dropped, routing.balance, z, rows], 1)
            counts = torch.cat([routing.load, totals], 1)  # (batch, num_counts)
            add_counts(self, counts.sum(0))

    @staticmethod
    def numbers(totals: Sequence[torch.Tensor]) -> dict[str, float]:
        """Returns columns of the training history, over all mixtures of a network.

        - `dropped_share`: Share of the requested assignments that were dropped.
        - `expert_balance`: Load of the busiest expert divided by the mean load; 1 is even. The largest
          value over all mixtures.
        - `balance_loss`, `z_loss`: Means over rows and mixtures, before multiplication by their weights.
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


def _check_router(
    num_experts: int, router: str, capacity_factor: float | None, causal: bool, random_second: bool
) -> None:
    check_choice("router", router, ROUTERS)
    least = 2 if router == "gshard" else 1
    if num_experts < least:
        raise ValueError(f"num_experts must be at least {least} for router {router!r}, got {num_experts}")
    if causal and router == "expert_choice":
        raise ValueError(
            "router 'expert_choice' lets later tokens of a row decide the experts of earlier tokens, which a "
            "causal network must not; use 'switch' or 'gshard'"
        )
    if capacity_factor is None and router == "expert_choice":
        raise ValueError(
            "router 'expert_choice' needs a capacity_factor, the mean number of experts per token; got None"
        )
    if capacity_factor is not None and not LEAST_FACTOR <= capacity_factor < math.inf:
        raise ValueError(
            f"capacity_factor must be at least {LEAST_FACTOR:f}, or None to drop no tokens, got "
            f"{capacity_factor}"
        )
    if random_second and router != "gshard":
        raise ValueError(
            f"random_second needs router 'gshard', which has two experts per token, got {router!r}"
        )


def mixture_options(given: Mapping[str, Any], depth: int) -> tuple[int, dict[str, Any]]:
    """Splits a network's argument `experts` into `every` and the options of `MixtureOfExperts`.

    If `every` is n, each n-th block has a mixture.
    """
    if not isinstance(given, Mapping):
        raise ValueError(f"experts must be a dict such as {{'num_experts': 8}}, got {given!r}")
    options = dict(given)
    every = options.pop("every", 2)
    known = [name for name in signature(MixtureOfExperts).parameters if name not in ("dim", "causal")]
    for name in options:
        if name not in known:
            hint = suggest(name, known)
            raise ValueError(f"experts has no option {name!r}{hint}; options are every, {', '.join(known)}")
    if "num_experts" not in options:
        raise ValueError(f"experts must give num_experts, such as {{'num_experts': 8}}, got {given!r}")
    if not 1 <= every <= depth:
        raise ValueError(f"experts: every must be from 1 to depth ({depth}), got {every}")
    return every, options
