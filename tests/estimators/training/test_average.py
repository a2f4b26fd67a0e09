"""The exponential moving average of weights, without a training."""

from contextlib import suppress

import pytest
import torch
from torch import nn

from ringspark.estimators.training.average import Average


def test_the_trained_weights_come_back_after_an_error() -> None:
    network = nn.Linear(1, 1)
    average = Average(network, 0.5)
    nn.init.constant_(network.weight, 3.0)
    with suppress(KeyError), average.in_place():
        assert torch.equal(network.weight, average.values["weight"])
        raise KeyError("in an evaluation")
    assert network.weight.item() == 3.0


def test_weights_of_16_bits_are_averaged_in_fp32() -> None:
    """In 16 bits, an update of a thousandth would be rounded away."""
    network = nn.Linear(1, 1).bfloat16()
    nn.init.constant_(network.weight, 1.0)
    average = Average(network, 0.999)
    nn.init.constant_(network.weight, 2.0)
    for _ in range(1000):
        average.update()
    assert average.values["weight"].item() == pytest.approx(2 - 0.999**1000, rel=1e-3)
