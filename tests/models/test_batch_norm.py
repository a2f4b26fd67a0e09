"""Batch normalization of a single row."""

import pytest
import torch
from torch import nn

from ringspark.models.batch_norm import accept_single_rows


def test_a_layer_trains_again_after_a_single_row_and_after_an_error_in_it() -> None:
    layer = nn.BatchNorm1d(3)
    accept_single_rows(layer)
    assert torch.equal(layer(torch.ones(1, 3)), torch.ones(1, 3) / (1 + layer.eps) ** 0.5)
    assert layer.training
    with pytest.raises(RuntimeError, match="running_mean"):
        layer(torch.ones(1, 4))
    assert layer.training
