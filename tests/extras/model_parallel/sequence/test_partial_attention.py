"""Attention over key chunks equals attention over all keys; each token span is on one rank."""

import math
from functools import reduce
from itertools import pairwise
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from ringspark.extras.model_parallel.sequence import partial_attention
from ringspark.extras.model_parallel.sequence.partial_attention import (
    Chunk,
    attend_by_products,
    attend_chunk,
    differentiate_by_products,
    differentiate_chunk,
    merge,
)
from ringspark.extras.model_parallel.sequence.span_attention import find_visible
from ringspark.extras.model_parallel.sequence.spans import Spans

# The CPU kernel of torch, and the matrix products that replace it on other devices.
BY = {
    "kernel": (attend_chunk, differentiate_chunk),
    "products": (attend_by_products, differentiate_by_products),
}


def _whole(query: Any, key: Any, value: Any, sees: Any) -> Any:
    """Returns the mean and the log-sum-exp; `sees` is (batch, 1, queries or 1, keys)."""
    scores = query @ key.mT / math.sqrt(query.shape[-1])
    exponentials = scores.exp() * sees
    total = exponentials.sum(-1, keepdim=True)
    # Without keys the mean is zero.
    return exponentials @ value / torch.where(total > 0, total, 1), total.log().squeeze(-1)


@pytest.mark.parametrize("by", BY)
@settings(deadline=None)
@given(st.data())
def test_parts_of_any_cut_in_any_order_merge_to_the_whole(by: str, data: st.DataObject) -> None:
    attend, gradients_of = BY[by]
    num_keys, num_queries = data.draw(st.integers(1, 9)), data.draw(st.integers(1, 4))
    cuts = sorted(data.draw(st.sets(st.integers(1, num_keys - 1), max_size=4)) if num_keys > 1 else [])
    bounds = list(zip([0, *cuts], [*cuts, num_keys], strict=True))
    order = data.draw(st.permutations(range(len(bounds))))
    is_kept = data.draw(st.lists(st.booleans(), min_size=num_keys, max_size=num_keys))
    generator = torch.Generator().manual_seed(data.draw(st.integers(0, 99)))

    def drawn(tokens: int) -> torch.Tensor:
        return torch.randn(2, 2, tokens, 4, dtype=torch.float64, generator=generator).requires_grad_()

    query, key, value = drawn(num_queries), drawn(num_keys), drawn(num_keys)
    mask = torch.ones(2, 1, 1, num_keys, dtype=torch.bool)
    mask[1, 0, 0] = torch.tensor(is_kept)  # may mask every key of this row
    want, log_sum = _whole(query, key, value, mask)
    weights = torch.randn(want.shape, dtype=torch.float64, generator=generator)
    (want * weights).sum().backward()

    with torch.no_grad():
        parts = [bounds[i] for i in order]
        whole = reduce(
            merge,
            [attend(Chunk(query, key[:, :, a:b], value[:, :, a:b], mask[..., a:b], False)) for a, b in parts],
        )
        torch.testing.assert_close(whole[0], want)
        torch.testing.assert_close(whole[1], log_sum)
        found: Any = [torch.zeros_like(x) for x in (query, key, value)]
        for a, b in parts:
            chunk = Chunk(query, key[:, :, a:b], value[:, :, a:b], mask[..., a:b], False)
            some = gradients_of(weights, chunk, whole)
            found[0] += some[0]
            found[1][:, :, a:b] += some[1]
            found[2][:, :, a:b] += some[2]
    for x, gradient in zip((query, key, value), found, strict=True):
        torch.testing.assert_close(x.grad, gradient)


@pytest.mark.parametrize("is_masked", [False, True])
@pytest.mark.parametrize("by", BY)
def test_causal_parts_have_the_gradients_of_the_formula(by: str, is_masked: bool, monkeypatch: Any) -> None:
    """Splits the queries into several rounds; a mask leaves the first queries without a key."""
    monkeypatch.setattr(partial_attention, "QUERIES", 3)
    attend, gradients_of = BY[by]
    torch.manual_seed(0)
    query, key, value, weights = (torch.randn(2, 2, 7, 4, dtype=torch.float64) for _ in range(4))
    for x in (query, key, value):
        x.requires_grad_()
    mask = torch.tensor([[False, False, True, True, False, True, True], [True] * 7])[:, None, None]
    sees = torch.ones(7, 7, dtype=torch.bool).tril() & (mask if is_masked else True)
    want, log_sum = _whole(query, key, value, sees)
    (want * weights).sum().backward()
    with torch.no_grad():
        chunk = Chunk(query, key, value, mask if is_masked else None, True)
        part = attend(chunk)
        torch.testing.assert_close(part[0], want)
        torch.testing.assert_close(part[1], log_sum)
        found = gradients_of(weights, chunk, part)
    for x, gradient in zip((query, key, value), found, strict=True):
        torch.testing.assert_close(x.grad, gradient)


def test_scores_beyond_the_range_of_exponentials_merge() -> None:
    one = torch.zeros(1, 1, 1, 2), torch.full((1, 1, 1), 1000.0)
    other = torch.ones(1, 1, 1, 2), torch.full((1, 1, 1), 1000.0)
    nothing = torch.zeros(1, 1, 1, 2), torch.full((1, 1, 1), -math.inf)
    mean, log_sum = merge(merge(nothing, one), merge(other, nothing))
    assert mean.tolist() == [[[[0.5, 0.5]]]]
    assert log_sum.item() == pytest.approx(1000 + math.log(2))
    mean, log_sum = merge(nothing, nothing)
    assert mean.tolist() == [[[[0.0, 0.0]]]]
    assert log_sum.item() == -math.inf


SPANS = st.builds(Spans, st.integers(1, 6), st.booleans())
LENGTHS = st.integers(0, 40)


@given(SPANS, LENGTHS)
def test_every_token_is_on_one_rank_and_parts_go_back_to_their_places(spans: Spans, seq: int) -> None:
    row = torch.arange(2 * seq).view(2, seq)
    parts = [spans.take(row, 1, rank) for rank in range(spans.num_ranks)]
    assert sorted(torch.cat(parts, 1)[0].tolist()) == list(range(seq))
    assert [part.shape[1] for part in parts] == spans.lengths(seq)
    assert torch.equal(spans.join(parts, 1), row)


@given(SPANS, LENGTHS, st.booleans())
def test_every_query_sees_each_of_its_keys_once(spans: Spans, seq: int, causal: bool) -> None:
    seen_pairs = torch.zeros(seq, seq, dtype=torch.long)
    pieces = [[span for rank in range(spans.num_ranks) for span in spans.of(rank, seq)], [(0, seq)]]
    # Keys arrive in chunks, or all at once.
    for keys in pieces:
        seen_pairs.zero_()
        for query in pieces[0]:
            for key in keys:
                for (begin, end), up_to_itself in find_visible(query, key, causal):
                    block = torch.ones(query[1] - query[0], end - begin, dtype=torch.long)
                    seen_pairs[slice(*query), begin:end] += block.tril() if up_to_itself else block
        want = torch.ones(seq, seq, dtype=torch.long)
        assert torch.equal(seen_pairs, want.tril() if causal else want)


@given(st.integers(1, 6), st.integers(1, 8))
def test_pieces_from_both_ends_give_every_rank_as_many_pairs(num_ranks: int, length: int) -> None:
    seq = 2 * num_ranks * length
    spans = Spans(num_ranks, zigzag=True)
    pairs = [sum(sum(range(b + 1, e + 1)) for b, e in spans.of(rank, seq)) for rank in range(num_ranks)]
    assert all(one == other for one, other in pairwise(pairs))
