"""Coordinates in a mesh."""

import pytest

from ringspark.estimators.options.mesh import AXES
from ringspark.estimators.parallel.mesh import ROWS, find_data_shard, group_ranks

ONES = dict.fromkeys(AXES, 1)


@pytest.mark.parametrize(
    "sizes", [{"data": 2, "shard": 3, "expert": 2}, {"pipeline": 2, "data": 3, "tensor": 2}]
)
def test_a_rank_s_share_of_the_rows_is_its_place_among_those_that_read_other_rows(sizes):
    full = ONES | sizes
    for group in group_ranks(full, ROWS):
        assert [find_data_shard(full, rank) for rank in group] == [(i, len(group)) for i in range(len(group))]
