"""Token routing: cases worked out by hand, and properties of every router."""

from typing import Any

import hypothesis.strategies as st
import pytest
import torch
from hypothesis import given

from ringspark.extras.experts.routing import (
    ROUTERS,
    CapacityRule,
    Routing,
    expert_choice,
    gshard,
    switch,
    z_loss,
)


def all_real(logits: torch.Tensor) -> torch.Tensor:
    return torch.ones(logits.shape[:2], dtype=torch.bool)


def lists(routing: Routing, num_experts: int) -> list[list[int]]:
    """Returns the tokens of each expert, in slot order."""
    pairs = list(zip(routing.experts.tolist(), routing.tokens.tolist(), strict=True))
    return [[token for expert, token in pairs if expert == number] for number in range(num_experts)]


# Six tokens; four of them prefer expert 0.
HALF = [[0.7, 0.2, 0.1], [0.6, 0.3, 0.1], [0.1, 0.8, 0.1]]
SIX = torch.tensor([[*HALF, [0.5, 0.1, 0.4], [0.4, 0.35, 0.25], [0.1, 0.2, 0.7]]]).log()


def test_capacity_counts_the_places_that_the_tokens_ask_for() -> None:
    rule = CapacityRule(capacity_factor=2, min_capacity=1)
    assert rule.capacity(torch.tensor([8]), num_experts=2, choices=2).tolist() == [16]
    assert rule.most(8, num_experts=2, choices=2) == 16
    # 10 * 1.1 must give 11 despite floating-point error.
    rule = CapacityRule(capacity_factor=1.1, min_capacity=1)
    assert rule.capacity(torch.tensor([10, 1, 0]), 1, 1).tolist() == [11, 2, 1]
    assert CapacityRule(capacity_factor=0.01, min_capacity=3).most(10, 4, 1) == 3


def test_switch_fills_an_expert_in_the_order_of_tokens_and_drops_the_rest() -> None:
    routing = switch(SIX, all_real(SIX), CapacityRule(capacity_factor=1, min_capacity=1))  # capacity 2
    assert lists(routing, 3) == [[0, 1], [2], [5]]
    assert routing.dropped.tolist() == [2.0]
    assert routing.asked.tolist() == [6.0]
    assert routing.load.tolist() == [[4.0, 1.0, 1.0]]
    assert torch.allclose(routing.weights, torch.tensor([0.7, 0.6, 0.8, 0.5, 0.4, 0.7]))


def test_a_causal_queue_gives_places_token_by_token() -> None:
    routing = gshard(SIX, all_real(SIX), CapacityRule(capacity_factor=0.75, min_capacity=1, in_order=True))
    assert lists(routing, 3) == [[0, 1, 2], [0, 1, 2], [3, 5]]


def test_equal_logits_go_to_the_first_expert_and_to_the_first_token() -> None:
    even = torch.zeros(1, 4, 3)
    rule = CapacityRule(capacity_factor=1.5, min_capacity=1)
    assert lists(switch(even, all_real(even), rule), 3) == [[0, 1], [], []]
    assert lists(gshard(even, all_real(even), rule), 3) == [[0, 1, 2, 3], [0, 1, 2, 3], []]
    assert lists(expert_choice(even, all_real(even), rule), 3) == [[0, 1]] * 3


def test_the_balance_loss_is_one_for_an_even_load_and_the_number_of_experts_for_one_expert() -> None:
    even = 50 * torch.eye(4)[None].repeat(1, 3, 1)
    assert torch.allclose(switch(even, all_real(even), CapacityRule()).balance, torch.ones(1))
    one = torch.zeros(1, 12, 4).index_fill(2, torch.tensor([2]), 50.0)
    assert torch.allclose(switch(one, all_real(one), CapacityRule()).balance, torch.tensor([4.0]))


def test_the_z_loss_is_the_squared_log_sum_of_tokens_alone() -> None:
    logits = torch.zeros(1, 3, 4)
    real = torch.tensor([[True, True, False]])
    assert torch.allclose(z_loss(logits, real), torch.tensor([4.0]).log().square())


def test_a_second_choice_by_chance_is_asked_for_by_twice_its_weight() -> None:
    torch.manual_seed(0)
    logits = torch.tensor([0.8, 0.2]).log().expand(1, 20_000, 2)
    rule = CapacityRule(capacity_factor=None, random_second=True)
    routing = gshard(logits, all_real(logits), rule)
    first, second = routing.load[0].tolist()
    assert first == 20_000
    assert second == pytest.approx(8_000, abs=300)  # 4 standard deviations
    assert routing.dropped.tolist() == [0.0]


@st.composite
def rows(draw: st.DrawFn) -> tuple[torch.Tensor, torch.Tensor]:
    batch, seq, experts = draw(st.integers(1, 3)), draw(st.integers(1, 9)), draw(st.integers(2, 5))
    generator = torch.Generator().manual_seed(draw(st.integers(0, 10_000)))
    # Few distinct values, so there are many ties.
    logits = torch.randint(-2, 3, (batch, seq, experts), generator=generator).float()
    return logits, torch.rand(batch, seq, generator=generator) < draw(st.sampled_from([0.3, 0.8, 1.0]))


@pytest.mark.parametrize("name", ROUTERS)
@given(
    case=rows(),
    factor=st.sampled_from([0.5, 1.0, 1.25, 2.0, None]),
    least=st.integers(1, 4),
    in_order=st.booleans(),
)
def test_slots_and_weights_of_routers(name: str, case: Any, factor: Any, least: int, in_order: bool) -> None:
    logits, real = case
    if name == "expert_choice" and factor is None:
        factor = 1.0
    rule = CapacityRule(capacity_factor=factor, min_capacity=least, in_order=in_order)
    routing = ROUTERS[name](logits, real, rule)
    batch, seq, experts = logits.shape
    choices = {"switch": 1, "gshard": 2, "expert_choice": 1}[name]
    is_used = routing.experts < experts
    tokens, chosen, weights = (t[is_used] for t in (routing.tokens, routing.experts, routing.weights))
    assert real.flatten()[tokens].all()  # padding takes no slot
    pairs = torch.stack([tokens, chosen], 1)
    assert len(pairs.unique(dim=0)) == len(pairs)  # a token uses an expert at most once
    times = torch.bincount(tokens, minlength=batch * seq).view(batch, seq)
    places = torch.zeros(batch, experts).index_put((tokens // seq, chosen), torch.ones(len(tokens)), True)
    if factor is not None:
        assert (places <= rule.capacity(real.sum(1), experts, choices)[:, None]).all()
    assert (weights >= 0).all()
    if name == "expert_choice":
        assert torch.equal(places, routing.load)
        assert torch.equal(routing.dropped, (real & (times == 0)).sum(1).float())
        return
    assert (times <= choices).all()
    assert torch.equal(routing.asked, choices * real.sum(1).float())
    assert torch.equal(routing.asked - routing.dropped, times.sum(1).float())
    assert torch.equal(routing.load.sum(1), routing.asked)
    if factor is None:
        assert not routing.dropped.any()
    total = torch.zeros(batch * seq).index_add(0, tokens, weights)
    assert (total < 1 + 1e-5).all()
    if name == "gshard" and factor is None:
        assert torch.allclose(total, real.flatten().float())


@pytest.mark.parametrize("name", ROUTERS)
@given(case=rows())
def test_a_row_is_routed_as_if_it_were_alone_and_without_padding(name: str, case: Any) -> None:
    logits, real = case
    rule = CapacityRule(capacity_factor=1.0, min_capacity=1)
    seq, experts = logits.shape[1:]
    together = ROUTERS[name](logits, real, rule)
    for number in range(len(logits)):
        kept = real[number].nonzero()[:, 0]
        own = logits[number : number + 1, kept]
        alone = ROUTERS[name](own, all_real(own), rule)
        mine = (together.tokens // seq == number) & (together.experts < experts)
        used = alone.experts < experts
        found = _table(together, mine, together.tokens[mine] % seq, logits.shape)
        wanted = _table(alone, used, kept[alone.tokens[used]], logits.shape)
        assert torch.allclose(found, wanted, rtol=0, atol=1e-6)
        assert torch.allclose(together.balance[number], alone.balance[0])
        assert together.dropped[number] == alone.dropped[0]


def _table(routing: Routing, used: torch.Tensor, tokens: torch.Tensor, shape: Any) -> torch.Tensor:
    """Returns 1 + the weight of each token (row) and expert (column) that are paired, 0 for the others."""
    return torch.zeros(shape[1:]).index_put((tokens, routing.experts[used]), 1 + routing.weights[used])
