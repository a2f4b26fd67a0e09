"""Sparse embedding gradients have the norm, noise and indices of a dense table."""

import pytest
import torch
from torch import nn

from ringspark.estimators.collectives.local_collective import LocalCollective
from ringspark.estimators.parallel.base import GradientSync
from ringspark.estimators.parallel.data.gradient_all_reduce import GradientAllReduce
from ringspark.estimators.parallel.data.sparse_rows import SparseRows


def _network(*, is_sparse: bool) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Embedding(50, 4, sparse=is_sparse), nn.Linear(4, 3)).double()


def _optimizer(module: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(module.parameters(), 0.1)


def _backward(module: nn.Module, *ids: int) -> None:
    """Adds gradients; a repeated id repeats in the sparse gradient."""
    module(torch.tensor(ids)).square().sum().backward()


def _gradients(module: nn.Module) -> torch.Tensor:
    gradients = [p.grad for p in module.parameters() if p.grad is not None]
    return torch.cat([(g.to_dense() if g.is_sparse else g).reshape(-1) for g in gradients])


@pytest.mark.parametrize("max_norm", [0.5, 1e6])
def test_rows_are_clipped_with_all_other_gradients(max_norm):
    found = []
    for is_sparse in (False, True):
        module = _network(is_sparse=is_sparse)
        _backward(module, 3, 3, 7)
        _backward(module, 7, 9)
        GradientSync(module, _optimizer(module)).clip_gradients(max_norm)
        found.append(_gradients(module))
    torch.testing.assert_close(found[1], found[0])
    assert float(found[1].norm()) <= max_norm


@pytest.mark.extras
def test_rows_count_in_the_noise_as_a_dense_table_does():
    """One rank measures it from micro-batches, several ranks from their local gradients."""
    from ringspark.extras.tuning.noise_scale import NoiseMeter

    states, squares = [], []
    for is_sparse in (False, True):
        module = _network(is_sparse=is_sparse)
        meter = NoiseMeter(GradientSync(module, _optimizer(module)), LocalCollective())
        _backward(module, 3, 3)
        meter.micro_batch(1, 2, 2)
        _backward(module, 7, 3)
        meter.solve(4, 4, 1.0)
        meter.keep()
        states.append(meter.state()["noise"])
        sync = GradientAllReduce(module, _optimizer(module), LocalCollective(), measures_local=True)
        sync.reduce()
        squares.append(sync.local_square)
    assert states[0].all()
    torch.testing.assert_close(states[1], states[0])
    torch.testing.assert_close(squares[1], squares[0])


def test_rows_of_a_table_too_long_for_indices_of_32_bits_keep_their_places():
    last = 2**31 + 5
    # All rows share one number, so the table needs no memory.
    table = nn.Parameter(torch.zeros(1, 1).expand(last + 1, 1), requires_grad=True)
    places, ones = torch.tensor([[4, last]]), torch.ones(2, 1)
    table.grad = torch.sparse_coo_tensor(places, ones, table.shape, check_invariants=True)
    rows = SparseRows(
        {"table": table}, torch.optim.SparseAdam([nn.Parameter(torch.zeros(1))]), LocalCollective()
    )
    rows.sum()
    assert table.grad.coalesce().indices().tolist() == [[4, last]]


def test_a_table_without_a_gradient_is_not_one_with_an_empty_gradient():
    table = nn.Embedding(4, 2, sparse=True)
    rows = SparseRows({"weight": table.weight}, torch.optim.SparseAdam([table.weight]), LocalCollective())
    rows.sum()
    assert table.weight.grad is None
    table(torch.zeros(0, dtype=torch.int64)).sum().backward()
    rows.sum()
    assert table.weight.grad is not None
