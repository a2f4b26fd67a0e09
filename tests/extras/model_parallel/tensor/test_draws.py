"""Dropout inside sharded layers differs per rank; dropout outside them is the same on all ranks."""

from typing import Any

import pytest
import torch
from ranks import run_ranks
from small_networks import Net
from torch import nn

from ringspark.estimators.collectives import Collective
from ringspark.extras.model_parallel.tensor.plan import make_region, shard_layers
from ringspark.extras.model_parallel.tensor.random_state import RankRandomState
from ringspark.models import apply_activation_checkpoint
from ringspark.models.lora import add_lora


class Seat:
    """Fake collective of one rank; an all-reduce returns the rank's own values."""

    name, size = "alone", 2

    def __init__(self, rank: int) -> None:
        self.rank = rank

    def all_reduce(self, tensor: torch.Tensor, op: str = "sum") -> torch.Tensor:
        return tensor.clone()


class Block(nn.Module):
    """Records the units dropped between the sharded layers and outside them."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(8, 64), nn.Linear(64, 8)
        self.dropout = nn.Dropout(0.5)
        self.inside: list[torch.Tensor] = []
        self.outside: list[torch.Tensor] = []

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = self.dropout(torch.ones_like(self.up(x)))
        self.inside.append(hidden.detach().clone())
        out = self.dropout(torch.ones_like(self.down(hidden)) * x)
        self.outside.append((out == 0).detach().clone())
        return x + out


def _run(rank: int, recompute: Any = None) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    torch.manual_seed(1)
    network = nn.Sequential(Block(), Block())
    seat: Any = Seat(rank)
    shard_layers(network, make_region(seat), {"*.up": "column", "*.down": "row"})
    if recompute is not None:
        apply_activation_checkpoint(network, recompute)
    torch.manual_seed(0)
    x = torch.ones(4, 8, requires_grad=True)
    for _ in range(2):
        network(x).sum().backward()
    return [t for block in network for t in block.inside], [t for block in network for t in block.outside]


def _differ(tensors: list[torch.Tensor]) -> bool:
    return all(not torch.equal(a, b) for i, a in enumerate(tensors) for b in tensors[:i])


def test_ranks_drop_other_units_inside_and_the_same_outside() -> None:
    with torch.random.fork_rng():
        first, second = _run(0), _run(1)
    assert all(torch.equal(a, b) for a, b in zip(first[1], second[1], strict=True))
    # Blocks and steps differ from each other too.
    assert _differ([*first[0], *second[0]])
    assert _differ(first[1])


def test_a_block_that_is_recomputed_drops_the_same_again() -> None:
    with torch.random.fork_rng():
        inside, outside = _run(1, recompute="all")
        plain, plain_outside = _run(1)
    # Two steps of each block; the backward pass repeats the forward pass.
    assert len(inside) == 2 * len(plain) == 8
    assert all(torch.equal(a, b) for a, b in zip(inside[::2], inside[1::2], strict=True))
    assert all(torch.equal(a, b) for a, b in zip(inside[::2], plain, strict=True))
    assert all(torch.equal(a, b) for a, b in zip(outside, plain_outside, strict=True))


def test_a_layer_that_is_left_open_and_restored_begins_anew() -> None:
    """This happens if only the column-sharded layer is recomputed."""
    cpu, seat = torch.device("cpu"), Seat(1)
    draws = RankRandomState(seat)  # type: ignore[arg-type]
    with torch.random.fork_rng():
        torch.manual_seed(3)
        before = torch.get_rng_state()
        draws.begin(cpu)
        inside = torch.rand(4)
        torch.set_rng_state(before)
        draws.begin(cpu)
        assert torch.equal(torch.rand(4), inside)
        draws.end()
        outside = torch.rand(4)
        torch.set_rng_state(before)
        torch.randint(2**62, ())
        assert torch.equal(torch.rand(4), outside)


def _attention() -> nn.Module:
    """Two column-sharded layers of equal inputs, before dropout and a row-sharded layer."""
    parts: dict[str, nn.Module] = {name: nn.Linear(8, 8) for name in "qko"}
    compute = lambda self, x: self.o(self.dropout(self.q(x) * self.k(x)))  # noqa: E731
    return Net(compute, **parts, dropout=nn.Dropout(0.5))


def _train_adapters(collective: Collective) -> dict[str, list[float]]:
    torch.manual_seed(1)
    network = _attention()
    add_lora(network, 2, 2.0, ["q", "k"], dropout=0.5)
    shard_layers(network, make_region(collective), {"q": "column", "k": "column", "o": "row"})
    trained = {n: p for n, p in network.named_parameters() if n.endswith("lora_A")}
    optimizer = torch.optim.SGD(network.parameters(), 0.1)
    torch.manual_seed(7)
    for _ in range(3):
        optimizer.zero_grad()
        network(torch.ones(4, 8)).square().sum().backward()
        optimizer.step()
    return {name: p.detach().flatten().tolist() for name, p in trained.items()}


@pytest.mark.distributed
def test_adapters_of_column_sharded_layers_drop_the_same_inputs_on_all_ranks() -> None:
    first, second = run_ranks(2, "torch", _train_adapters)
    assert set(first) == {"q.lora_A", "k.lora_A"}
    assert first == second
