"""Assigns tokens to experts, by pure functions of fp32 logits.

Only the tokens of one row compete for an expert's capacity, so the result does not depend on the batch or on
the number of ranks. If two experts or tokens are equal, the first of them wins.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from fractions import Fraction

import torch


@dataclass(frozen=True, kw_only=True)
class CapacityRule:
    """How many tokens of a row each expert takes, and which tokens come first.

    Attributes:
        capacity_factor: Capacity of all experts together, divided by the number of assignments that a row's
            tokens request. None means no limit.
        min_capacity: Smallest capacity of an expert, in tokens per row.
        in_order: Whether all choices of an earlier token come before those of later tokens, as a causal
            network needs. If False, all first choices come before all second choices, as in GShard.
        random_second: Whether a token requests its second choice at random, with twice the choice's weight as
            probability.
        chances: Function that takes a tensor and returns random numbers from 0 to 1 in the tensor's shape.
            These numbers decide random second choices.
    """

    capacity_factor: float | None = 1.25
    min_capacity: int = 4
    in_order: bool = False
    random_second: bool = False
    chances: Callable[[torch.Tensor], torch.Tensor] = torch.rand_like

    def capacity(self, tokens: torch.Tensor, num_experts: int, choices: int) -> torch.Tensor:
        """Returns max(min_capacity, ceil(choices * tokens / num_experts * capacity_factor)) for each row.

        `tokens` is (batch,) int64, the number of tokens of each row; the result has the same shape and dtype.
        `choices` is the number of experts that a token requests.
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
        tokens: Token of each assignment, (assignments,) int64: its index after (batch, seq) is flattened.
        experts: Expert of each assignment, (assignments,) int64. The value `num_experts` means no expert: for
            padding, dropped tokens, and second choices that were not requested.
        weights: Factor for the expert's output, (assignments,) fp32. The router's gradient flows through it.
        load: Number of tokens that requested each expert, (batch, num_experts) fp32.
        asked: Number of requested assignments, (batch,) fp32. With expert choice, the number of tokens.
        dropped: Number of requested assignments beyond the capacity, (batch,) fp32. With expert choice, the
            number of tokens that no expert took.
        balance: Balance loss of the Switch paper for each row, (batch,) fp32: `num_experts` times the sum of
            f * P over the experts. f is the share of the row's tokens with the expert as first choice, and P
            the expert's mean probability.
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
    """Lets each token request its best expert (Fedus et al. 2021, "Switch Transformers").

    Args:
        logits: (batch, seq, num_experts) fp32.
        real: (batch, seq) booleans, False for padding.
    """
    return _tokens_choose(logits, real, rule, 1)


def gshard(logits: torch.Tensor, real: torch.Tensor, rule: CapacityRule) -> Routing:
    """Lets each token request its two best experts (Lepikhin et al. 2020, "GShard").

    Takes the arguments of `switch`.
    """
    return _tokens_choose(logits, real, rule, 2)


def expert_choice(logits: torch.Tensor, real: torch.Tensor, rule: CapacityRule) -> Routing:
    """Lets each expert take a row's tokens with the expert's highest probabilities (Zhou et al. 2022).

    A token may get several experts, or none. The load is even, so the balance loss is 0.
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
    """Returns the z loss per row, (batch,): the mean of the squared log-sum-exp of its tokens' logits.

    It keeps logits small, because large logits have large rounding errors (Zoph et al. 2022, "ST-MoE").
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
    """Flattens (batch, seq, choices) to (batch, seq * choices): by token if `in_order`, else by choice."""
    return (values if in_order else values.transpose(1, 2)).flatten(1)


def _row_starts(logits: torch.Tensor) -> torch.Tensor:
    """Returns, as (batch, 1, 1), the index of each row's first token after (batch, seq) is flattened."""
    batch, seq, _ = logits.shape
    return (torch.arange(batch, device=logits.device) * seq)[:, None, None]


def _mean(values: torch.Tensor, real: torch.Tensor) -> torch.Tensor:
    """Returns the mean of `values`, (batch, seq, ...), over a row's real tokens; 0 if there are none."""
    weights = real.to(values.dtype)
    if values.dim() > 2:
        weights = weights[..., None]
    return (values * weights).sum(1) / weights.sum(1).clamp(min=1)
