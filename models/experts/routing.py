"""Assigns tokens to experts: pure functions on fp32 logits.

Tokens of one row compete for an expert's capacity, so the result depends neither on the batch nor on the
number of ranks. Of equal experts or tokens, the first wins.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from fractions import Fraction

import torch


@dataclass(frozen=True, kw_only=True)
class CapacityRule:
    """Number of tokens of a row that an expert takes, and their order.

    Attributes:
        capacity_factor: Capacity of all experts together, as a multiple of the assignments that a row's
            tokens request; None for no limit.
        min_capacity: Smallest capacity of an expert.
        in_order: Whether all choices of earlier tokens come first, as a causal network needs. If not, all
            first choices come first, as in GShard.
        random_second: Whether a second choice is requested with a probability of twice its weight.
        chances: Draws numbers from 0 to 1 for random second choices, shaped like its argument.
    """

    capacity_factor: float | None = 1.25
    min_capacity: int = 4
    in_order: bool = False
    random_second: bool = False
    chances: Callable[[torch.Tensor], torch.Tensor] = torch.rand_like

    def capacity(self, tokens: torch.Tensor, num_experts: int, choices: int) -> torch.Tensor:
        """Returns max(min_capacity, ceil(choices * tokens / num_experts * capacity_factor)), (batch,).

        `tokens` is the number of tokens of each row, (batch,) int64; `choices` the experts that a token
        requests.
        """
        over, under = self._ratio(num_experts, choices)
        return ((tokens * over + under - 1) // under).clamp(min=self.min_capacity)

    def most(self, tokens: int, num_experts: int, choices: int) -> int:
        over, under = self._ratio(num_experts, choices)
        return max((tokens * over + under - 1) // under, self.min_capacity)

    def _ratio(self, num_experts: int, choices: int) -> tuple[int, int]:
        assert self.capacity_factor is not None
        # Fractions, because in floating point 10 times 1.1 is more than 11. The factor is bounded, because
        # a factor of `num_experts` drops no tokens, and a huge factor would overflow 64 bits.
        factor = Fraction(min(self.capacity_factor, max(num_experts, 1000))).limit_denominator(10**6)
        return choices * factor.numerator, num_experts * factor.denominator


@dataclass(frozen=True, kw_only=True)
class Routing:
    """Assignments of tokens to experts, and statistics of each row.

    Attributes:
        tokens: Index of each token in (batch * seq), (assignments,) int64.
        experts: Expert of each assignment, (assignments,) int64; `num_experts` if nothing is computed, for
            padding, second choices that were not requested, and dropped tokens.
        weights: Factor of the expert's output, (assignments,) fp32, with the gradient of the router.
        load: Tokens that requested each expert, (batch, num_experts) fp32.
        asked: Requested assignments, (batch,) fp32; with expert choice, tokens.
        dropped: Requested assignments beyond the capacity, (batch,) fp32.
        balance: Switch's balance loss of each row, (batch,) fp32: `num_experts` times the sum over experts of
            the share of first choices times the mean probability.
    """

    tokens: torch.Tensor
    experts: torch.Tensor
    weights: torch.Tensor
    load: torch.Tensor
    asked: torch.Tensor
    dropped: torch.Tensor
    balance: torch.Tensor


Router = Callable[[torch.Tensor, torch.Tensor, CapacityRule], Routing]


def switch(logits: torch.Tensor, real: torch.Tensor, rule: CapacityRule) -> Routing:
    """Each token requests its best expert (Fedus et al. 2021, "Switch Transformers").

    Args:
        logits: (batch, seq, num_experts) fp32.
        real: (batch, seq) booleans, False for padding.
    """
    return _tokens_choose(logits, real, rule, 1)


def gshard(logits: torch.Tensor, real: torch.Tensor, rule: CapacityRule) -> Routing:
    """Each token requests its two best experts (Lepikhin et al. 2020, "GShard"). Arguments as in `switch`."""
    return _tokens_choose(logits, real, rule, 2)


def expert_choice(logits: torch.Tensor, real: torch.Tensor, rule: CapacityRule) -> Routing:
    """Each expert takes the tokens of a row with the highest probabilities (Zhou et al. 2022).

    A token may have several experts, or none. The load is even, so the balance loss is 0.
    """
    batch, seq, num_experts = logits.shape
    probabilities = logits.softmax(-1)
    with torch.no_grad():
        lengths = real.sum(1)
        capacity = torch.minimum(rule.capacity(lengths, num_experts, 1), lengths)  # (batch,)
        wanted = probabilities.masked_fill(~real[..., None], -1.0)
        most = min(seq, rule.most(seq, num_experts, 1))
        # The best first, (batch, most, experts).
        best = wanted.sort(dim=1, descending=True, stable=True).indices[:, :most]
        taken = torch.arange(most, device=logits.device) < capacity[:, None]  # (batch, most)
        experts = torch.arange(num_experts, device=logits.device).where(taken[..., None], num_experts)
        times = torch.zeros_like(wanted).scatter_(1, best, taken[..., None].expand_as(best).to(wanted.dtype))
        left = real & ~times.any(-1)
    weights = probabilities.gather(1, best)
    return Routing(
        tokens=(best + _row_starts(logits)).flatten(),
        experts=experts.flatten(),
        weights=weights.flatten(),
        load=capacity[:, None].expand(batch, num_experts).float(),
        asked=lengths.float(),
        dropped=left.sum(1).float(),
        balance=logits.new_zeros(batch),
    )


ROUTERS: dict[str, Router] = {"switch": switch, "gshard": gshard, "expert_choice": expert_choice}


def z_loss(logits: torch.Tensor, real: torch.Tensor) -> torch.Tensor:
    """Returns each row's mean of the squared log-sum-exp of its tokens' logits, (batch,).

    Zoph et al. 2022, "ST-MoE": large logits round badly.
    """
    return _mean(logits.logsumexp(-1).square(), real)


def _tokens_choose(logits: torch.Tensor, real: torch.Tensor, rule: CapacityRule, choices: int) -> Routing:
    num_experts = logits.shape[-1]
    probabilities = logits.softmax(-1)
    with torch.no_grad():
        best = _best(probabilities, choices)  # (batch, seq, choices)
    gates = probabilities.gather(-1, best)
    if choices > 1:
        gates = gates / gates.sum(-1, keepdim=True)
    with torch.no_grad():
        asks = real[..., None].expand(best.shape)
        if rule.random_second and choices > 1:
            second = 2 * gates[..., 1:] > rule.chances(gates[..., 1:])
            asks = torch.cat([asks[..., :1], asks[..., 1:] & second], -1)
        queue = _queue(best.where(asks, num_experts), rule.in_order)  # (batch, seq * choices)
        is_asked = queue[..., None] == torch.arange(num_experts, device=logits.device)
        places = (is_asked.cumsum(1, dtype=torch.int32) * is_asked).sum(-1)  # from 1; 0 where not asked
        kept = places > 0
        if rule.capacity_factor is not None:
            kept &= places <= rule.capacity(real.sum(1), num_experts, choices)[:, None]
        first = (best[..., :1] == torch.arange(num_experts, device=logits.device)).to(logits.dtype)
        load = is_asked.sum(1).float()  # (batch, experts)
        asked = load.sum(-1)
    tokens = _queue(
        torch.arange(logits.shape[1], device=logits.device)[:, None].expand_as(best), rule.in_order
    )
    return Routing(
        tokens=(tokens + _row_starts(logits)[..., 0]).flatten(),
        experts=queue.where(kept, num_experts).flatten(),
        weights=_queue(gates, rule.in_order).flatten(),
        load=load,
        asked=asked,
        dropped=asked - kept.sum(1),
        balance=num_experts * (_mean(first, real) * _mean(probabilities, real)).sum(-1),
    )


def _best(probabilities: torch.Tensor, choices: int) -> torch.Tensor:
    found: list[torch.Tensor] = []
    for _ in range(choices):
        # `argmax` returns the first of equals; `topk` does not promise it.
        best = probabilities.argmax(-1, keepdim=True)
        probabilities = probabilities.scatter(-1, best, -1.0)
        found.append(best)
    return torch.cat(found, -1)


def _queue(values: torch.Tensor, in_order: bool) -> torch.Tensor:
    """Flattens (batch, seq, choices) in the order in which capacity is given."""
    return (values if in_order else values.transpose(1, 2)).flatten(1)


def _row_starts(logits: torch.Tensor) -> torch.Tensor:
    """Returns the index of each row's first token in (batch * seq), (batch, 1, 1)."""
    batch, seq, _ = logits.shape
    return (torch.arange(batch, device=logits.device) * seq)[:, None, None]


def _mean(values: torch.Tensor, real: torch.Tensor) -> torch.Tensor:
    """Returns the mean of (batch, seq, ...) over each row's tokens, (batch, ...); 0 without tokens."""
    weights = real.to(values.dtype)
    if values.dim() > 2:
        weights = weights[..., None]
    return (values * weights).sum(1) / weights.sum(1).clamp(min=1)
