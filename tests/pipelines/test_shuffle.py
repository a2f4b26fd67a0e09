import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from ringspark.pipelines.shuffle import permutation


@given(length=st.integers(0, 3000), key=st.lists(st.integers(-(2**63), 2**63 - 1), min_size=1, max_size=4))
def test_a_permutation_holds_every_index_once_and_repeats(length: int, key: list[int]) -> None:
    order = permutation(length, *key)
    assert order.dtype == np.int64
    assert np.array_equal(np.sort(order), np.arange(length))
    assert np.array_equal(order, permutation(length, *key))


def test_keys_that_differ_in_length_or_order_differ() -> None:
    keys = [(1,), (1, 0), (0, 1), (1, 0, 0), (2,), (1, 1)]
    orders = {tuple(permutation(50, *key).tolist()) for key in keys}
    assert len(orders) == len(keys)


def test_every_place_is_equally_likely() -> None:
    firsts = np.bincount([int(permutation(8, 0, epoch)[0]) for epoch in range(4000)], minlength=8)
    # 500 expected, standard deviation 21.
    assert firsts.min() > 400
    assert firsts.max() < 600
