"""Token spans of a row on each rank."""

from __future__ import annotations

from itertools import pairwise

import torch
from hypothesis import given
from hypothesis import strategies as st

from ringspark.extras.model_parallel.sequence.span_attention import find_visible
from ringspark.extras.model_parallel.sequence.spans import Spans

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
