"""Rows that contain only padding."""

import pytest
import torch
from torch import nn

from ringspark.extras.networks.recurrent import POOLS
from ringspark.models import ModelSpec

IDS = torch.tensor([[0, 0, 0], [3, 1, 0]])
NETWORKS = {
    **{f"recurrent {pool}": {"hidden": 4, "pool": pool, "padding_id": 0} for pool in POOLS},
    "transformer_classifier": {"max_seq_len": 3, "dim": 4, "depth": 1, "num_heads": 2, "padding_id": 0},
    "embedding_mean": {"dim": 4},
}


@pytest.mark.parametrize("name", NETWORKS)
def test_a_row_of_padding_only_is_summarized_as_zeros(name: str) -> None:
    kwargs = {"vocab_size": 5, "out_features": 2, **NETWORKS[name]}
    network: nn.Module = ModelSpec(name.split()[0], kwargs).build()
    out = network(IDS, IDS != 0) if name == "embedding_mean" else network(IDS)
    assert torch.equal(out[0], network.head.bias)
    out.square().sum().backward()
    assert all(p.grad is not None and p.grad.isfinite().all() for p in network.parameters())
