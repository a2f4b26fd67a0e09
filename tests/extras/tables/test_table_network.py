"""The networks for tables learn a label of any center and scale, in any precision."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from ringspark.extras.tables.tabm import TabM
from ringspark.extras.tables.tabpack import TabPack

EDGES = [[-2.0, -1.0, 0.0, 1.0, 2.0]] * 3
MEMBERS = {"dropouts": [0.0] * 2, "rates": [1.0] * 2}
NETWORKS: dict[str, Callable[..., nn.Module]] = {
    "tabpack": lambda **label: TabPack(EDGES, [4], 1, **MEMBERS, unknown=0, **label),
    "tabm": lambda **label: TabM(EDGES, [4], 1, members=2, dropout=0.0, unknown=0.0, **label),
}


def made(name: str, **label: float) -> nn.Module:
    torch.manual_seed(0)
    return NETWORKS[name](**label)


@pytest.fixture
def rows() -> tuple[torch.Tensor, torch.Tensor]:
    return torch.randn(64, 3), torch.randint(0, 4, (64, 1))


@pytest.mark.parametrize("name", NETWORKS)
@pytest.mark.parametrize("trains", [True, False])
def test_sixteen_bits_round_the_standardized_output_only(name: str, trains: bool, rows: Any) -> None:
    network = made(name, center=1000.0, scale=1.0).train(trains)
    wanted = network(*rows)
    with torch.autocast("cpu", torch.bfloat16):
        found = network(*rows)
    # Around 1000, the distance of two numbers in bf16 is 4.
    assert found.dtype == torch.float32
    assert (found - wanted).abs().max() < 0.05


@pytest.mark.parametrize("name", NETWORKS)
@pytest.mark.parametrize("scale", [1e-6, 1e6])
def test_gradients_do_not_depend_on_the_unit_of_the_label(name: str, scale: float, rows: Any) -> None:
    target = torch.randn(64, 1, 1)
    gradients = []
    for unit in (1.0, scale):
        network = made(name, center=5 * unit, scale=unit).train()
        ((network(*rows) - (5 + target) * unit) ** 2).mean().backward()
        gradients.append([p.grad for p in network.parameters() if p.grad is not None])
    assert gradients[0]
    torch.testing.assert_close(*gradients, rtol=1e-3, atol=1e-6)
