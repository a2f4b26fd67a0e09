"""What a rank refuses to exchange, without a second rank."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from ringspark.estimators.collectives.local_collective import LocalCollective
from ringspark.estimators.parallel.data.gradient_sum import SummedGradients


class Twice(nn.Module):
    """Its one layer is recomputed twice, each time in a backward pass of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(2, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for _ in range(2):
            x = checkpoint(self.layer, x, use_reentrant=True)
        return x


@pytest.mark.parametrize("flat_bytes", [0, 1 << 20])
def test_a_gradient_that_comes_again_after_its_bucket_left_is_refused(flat_bytes: int) -> None:
    """One exchange for all of them leaves after the backward pass, so there it may come in parts."""
    module = Twice()
    rows = torch.ones(3, 2, requires_grad=True)
    expected = torch.autograd.grad(module.layer(module.layer(rows)).sum(), module.layer.weight)[0]
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
    sync = SummedGradients(module, optimizer, LocalCollective(), flat_bytes=flat_bytes, bucket_bytes=1)
    with sync.micro_batch(last=True):
        loss = sync.module(rows).sum()
        if not flat_bytes:
            with pytest.raises(
                ValueError, match=r"a gradient came again .*; checkpoint .* use_reentrant=False"
            ):
                loss.backward()
            return
        loss.backward()
    sync.reduce()
    assert torch.allclose(module.layer.weight.grad, expected)  # type: ignore[arg-type]
