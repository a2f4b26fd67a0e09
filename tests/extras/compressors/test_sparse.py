"""Sparse all-reduce: elements of a long vector, sent with their indices."""

import torch

from ringspark.estimators.collectives.local_collective import LocalCollective
from ringspark.extras.compressors.sparse import all_reduce_sparse


def test_places_in_every_part_of_a_long_vector_arrive_and_the_rest_is_the_error() -> None:
    """Indices are sent as 16 bits within blocks."""
    vector = torch.arange(1.0, 200_001.0)
    places = torch.cat([torch.arange(0, 200_000, 777), torch.tensor([32_768, 65_535, 65_536])]).unique()
    sent = all_reduce_sparse(vector, places, vector[places], LocalCollective(), is_equal=False)
    expected = torch.zeros_like(vector).index_copy_(0, places, vector[places])
    assert torch.equal(sent.total, expected)
    assert torch.equal(sent.error, vector - expected)
