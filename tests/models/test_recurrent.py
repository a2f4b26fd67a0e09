"""Recurrent networks and rows that are filled up."""

import pytest
import torch

from ringspark.models.recurrent import POOLS, Recurrent


@pytest.mark.parametrize("pool", POOLS)
def test_a_row_of_padding_only_is_summarized_as_zeros(pool: str) -> None:
    network = Recurrent(hidden=4, out_features=2, vocab_size=5, pool=pool, padding_id=0)
    out = network(torch.tensor([[0, 0, 0], [3, 1, 0]]))
    assert torch.equal(out[0], network.head.bias)
    out.square().sum().backward()
    assert all(p.grad is not None and p.grad.isfinite().all() for p in network.parameters())
