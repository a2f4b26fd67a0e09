"""Collectives inside a network give the values and gradients of one process with whole tensors."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from ranks import run_ranks

from ringspark.estimators.collectives import Collective
from ringspark.estimators.options.mesh import AXES
from ringspark.estimators.parallel.mesh import group_ranks
from ringspark.estimators.parallel.shard_spec import shard_view
from ringspark.extras.model_parallel.communication import (
    all_gather,
    all_gather_for_shards,
    all_reduce,
    all_reduce_gradient,
    all_to_all,
    reduce_scatter,
    scale_gradient,
    take_shard,
)

pytestmark = pytest.mark.distributed
SHAPE = (5, 3)  # does not divide by 2 along either dimension


def _whole() -> torch.Tensor:
    return torch.arange(15.0, dtype=torch.float64).view(SHAPE) + 1


def _own(rank: int) -> torch.Tensor:
    """Returns weights that differ by rank."""
    return torch.linspace(1, 2 + rank, 15, dtype=torch.float64).view(SHAPE)


def _gradient(loss: Callable[[torch.Tensor], torch.Tensor], x: torch.Tensor) -> tuple[float, torch.Tensor]:
    x = x.clone().requires_grad_()
    value = loss(x)
    value.backward()
    return float(value.detach()), x.grad


def _penalty(loss: Callable[[torch.Tensor], torch.Tensor]) -> Callable[[torch.Tensor], torch.Tensor]:
    """Returns a function that computes the squared gradient norm of a loss."""

    def penalty(x: torch.Tensor) -> torch.Tensor:
        (gradient,) = torch.autograd.grad(loss(x), x, create_graph=True)
        return gradient.square().sum()

    return penalty


def _all(collective: Collective) -> Any:
    rank, size = collective.rank, collective.size
    ranks, found = range(size), {}

    def same(name: str, got: tuple[float, torch.Tensor], want: tuple[float, torch.Tensor]) -> None:
        found[name] = abs(got[0] - want[0]) < 1e-9 and torch.allclose(got[1], want[1])

    # Each rank uses a replicated value differently; the results are all-reduced.
    same(
        "copied and summed",
        _gradient(
            lambda x: all_reduce(all_reduce_gradient(x, collective) * _own(rank), collective).square().sum(),
            _whole(),
        ),
        _gradient(lambda x: sum(x * _own(r) for r in ranks).square().sum(), _whole()),
    )
    for dim in (0, 1):
        whole = _gradient(lambda x: (x.square() * _own(0)).sum(), _whole())
        got = _gradient(
            lambda x, dim=dim: (all_gather(x, dim, collective, SHAPE[dim]).square() * _own(0)).sum(),
            shard_view(_whole(), dim, rank, size),
        )
        same(f"joined {dim}", got, (whole[0], shard_view(whole[1], dim, rank, size)))
        got = _gradient(
            lambda x, dim=dim: (
                all_gather(take_shard(x, dim, collective) * 2, dim, collective, SHAPE[dim]).square().sum()
            ),
            _whole(),
        )
        same(f"part {dim}", got, _gradient(lambda x: (2 * x).square().sum(), _whole()))

        # A partial value is reduce-scattered, then gathered for shards that use it differently.
        def scattered(x: torch.Tensor, dim: int = dim) -> torch.Tensor:
            own = reduce_scatter(all_reduce_gradient(x, collective) * _own(rank), dim, collective)
            whole = all_gather_for_shards(own, dim, collective, SHAPE[dim])
            return all_reduce(whole * _own(rank), collective).square().sum()

        got = _gradient(scattered, _whole())
        want = _gradient(
            lambda x: sum(sum(x * _own(r) for r in ranks) * _own(q) for q in ranks).square().sum(), _whole()
        )
        same(f"scattered {dim}", got, want)
    # Second derivatives: gradient penalties, as in force fields and adversarial losses.
    for name, got, want in (
        (
            "copied and summed twice",
            lambda x: all_reduce((all_reduce_gradient(x, collective).sin() * _own(rank)).sum(), collective),
            lambda x: sum((x.sin() * _own(r)).sum() for r in ranks),
        ),
        (
            "part and joined twice",
            lambda x: all_gather(take_shard(x, 0, collective).sin(), 0, collective, 5).square().sum(),
            lambda x: x.sin().square().sum(),
        ),
    ):
        same(name, _gradient(_penalty(got), _whole()), _gradient(_penalty(want), _whole()))
    for name, function in (
        ("scattered", lambda x: reduce_scatter(x, 0, collective)),
        ("joined for parts", lambda x: all_gather_for_shards(x, 0, collective, 5 * size)),
        ("scaled", lambda x: scale_gradient(x, 0.5)),
    ):
        try:
            _gradient(_penalty(lambda x, f=function: f(x).pow(3).sum()), _whole())
        except RuntimeError as error:
            found[f"{name} refuses second derivatives"] = "differentiate twice" in str(error)
        else:
            found[f"{name} refuses second derivatives"] = False
    # A batch of zero rows still has a token dimension.
    joined = all_gather(torch.empty(0, 2, 3), 2, collective, 3 * size)
    found["nothing joined"] = joined.shape == (0, 2, 3 * size)
    # Row i of rank r goes to rank (i + r) % size and comes back weighted.
    rows = torch.arange(4.0, dtype=torch.float64).view(4, 1) + 10 * rank
    order = sorted(range(4), key=lambda i: ((i + rank) % size, i))
    counts = [sum((i + r) % size == q for i in range(4)) for r in ranks for q in ranks]
    sent, arriving = counts[rank * size :][:size], counts[rank::size]
    x = rows.clone().requires_grad_()
    moved = all_to_all(x[order], sent, arriving, collective)
    back = all_to_all(moved * (rank + 1), arriving, sent, collective)
    (gradient,) = torch.autograd.grad(back.square().sum(), x, create_graph=True)
    factors = torch.tensor([[(i + rank) % size + 1.0] for i in range(4)], dtype=torch.float64)
    found["exchanged"] = torch.allclose(gradient, 2 * rows * factors**2) and len(moved) == sum(arriving)
    gradient.square().sum().backward()
    found["exchanged twice"] = torch.allclose(x.grad, 8 * rows * factors**4)
    return found


@pytest.mark.parametrize("size", [2, pytest.param(3, marks=pytest.mark.slow)])
def test_values_and_gradients_are_those_of_the_whole(size: int) -> None:
    for text in run_ranks(size, "torch", _all):
        assert all(text.values()), text


def test_the_groups_over_axes_hold_every_rank_once_and_neighbours_on_the_last_axis() -> None:
    sizes = dict.fromkeys(AXES, 1) | {"pipeline": 2, "data": 2, "tensor": 2}
    assert group_ranks(sizes, ["tensor"]) == [[0, 1], [2, 3], [4, 5], [6, 7]]
    assert group_ranks(sizes, ["pipeline"]) == [[0, 4], [1, 5], [2, 6], [3, 7]]
    assert group_ranks(sizes, ["data", "tensor"]) == [[0, 1, 2, 3], [4, 5, 6, 7]]
