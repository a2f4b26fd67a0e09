"""A vocabulary learned from counts."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ringspark.pipelines import Vocabulary
from ringspark.pipelines.kinds.strings import fill_vocabulary

COUNTS = [("b", 2), ("d", 1), ("a", 2), ("c", 3), ("e", 2)]


@pytest.mark.parametrize(
    ("kind", "words"),
    [
        (Vocabulary(), "cabed"),
        (Vocabulary(max_size=3), "cab"),
        (Vocabulary(max_size=2, order="alphabet"), "ac"),
        (Vocabulary(min_count=2, order="alphabet"), "abce"),
    ],
)
@given(counts=st.permutations(COUNTS))
def test_the_order_of_the_counts_changes_nothing(kind, words, counts):
    """Spark returns the counts in any order; without sorting, the next run would get other ids."""
    assert fill_vocabulary(kind, counts).words == tuple(words)
