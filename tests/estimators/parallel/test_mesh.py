"""Coordinates in a mesh."""

import pytest

from ringspark.estimators.parallel.mesh import AXES, ROWS, groups_over, share_of

ONES = dict.fromkeys(AXES, 1)


@pytest.mark.parametrize(
    "sizes", [{"data": 2, "shard": 3, "expert": 2}, {"pipeline": 2, "data": 3, "tensor": 2}]
)
def test_a_rank_s_share_of_the_rows_is_its_place_among_those_that_read_other_rows(
    sizes: dict[str, int],
) -> None:
    full = ONES | sizes
    for group in groups_over(full, ROWS):
        assert [share_of(full, rank) for rank in group] == [(i, len(group)) for i in range(len(group))]
