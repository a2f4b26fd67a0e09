"""The two halves of a split backward pass give the gradients of an unsplit one."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import pytest
import torch
import torch.utils.checkpoint
from torch import nn
from torch.nn import functional as F

from ringspark.extras.model_parallel.pipeline.split_backward import run_input_pass, run_weight_passes
from ringspark.models import apply_activation_checkpoint

Weights = Sequence[torch.Tensor]
Stage = Callable[[torch.Tensor, torch.Tensor, Weights], tuple[torch.Tensor, ...]]


def _used_twice(x: torch.Tensor, y: torch.Tensor, w: Weights) -> tuple[torch.Tensor, ...]:
    return (F.linear(F.linear(F.linear(x, w[0]).tanh(), w[1]).tanh(), w[0]) + y,)


def _shared_by_layers(x: torch.Tensor, y: torch.Tensor, w: Weights) -> tuple[torch.Tensor, ...]:
    # Two additions: w[0] enters the first, w[2] the second, and w[1] both.
    return ((x + (w[0] + w[1])).tanh() @ y + (w[2] + w[1]),)


def _handed_on(x: torch.Tensor, y: torch.Tensor, w: Weights) -> tuple[torch.Tensor, ...]:
    query = w[0].tanh()
    return x + query * w[1], w[0], query, query.exp()[:2], x, y


STAGES: dict[str, Stage] = {
    "used twice": _used_twice,
    "shared": _shared_by_layers,
    "handed on": _handed_on,
    "not reached": lambda x, y, w: (w[0] * 2, w[0] @ w[1]),
    "inputs alone": lambda x, y, w: (x * y,),
}


@pytest.mark.parametrize("stage", STAGES.values(), ids=STAGES)
def test_both_halves_give_the_gradients_of_a_whole_backward_pass(stage: Stage) -> None:
    leaves = [torch.randn(4, 4, requires_grad=True) for _ in range(5)]
    results = stage(*leaves[:2], leaves[2:])
    gradients = [torch.randn_like(result) for result in results]
    want = torch.autograd.grad(results, leaves, gradients, allow_unused=True, retain_graph=True)
    passes = run_input_pass(results, gradients, leaves[:2])
    assert all(leaf.grad is None for leaf in leaves[2:])
    run_weight_passes(passes)
    for leaf, gradient in zip(leaves, want, strict=True):
        assert (leaf.grad is None) == (gradient is None)
        if gradient is not None:
            torch.testing.assert_close(leaf.grad, gradient)


def test_the_second_half_computes_no_gradient_of_values_again() -> None:
    """The split must compute each gradient only once."""
    calls = []

    class Watched(torch.autograd.Function):
        @staticmethod
        def forward(ctx: object, x: torch.Tensor) -> torch.Tensor:
            return x.clone()

        @staticmethod
        def backward(ctx: object, gradient: torch.Tensor) -> torch.Tensor:  # type: ignore[override]
            calls.append(gradient)
            return gradient

    x = torch.randn(4, 4, requires_grad=True)
    weights = [torch.randn(4, 4, requires_grad=True) for _ in range(3)]
    y = x
    for weight in weights:
        y = Watched.apply(F.linear(y, weight))
    passes = run_input_pass([y], [torch.ones_like(y)], [x])
    assert len(calls) == 3
    run_weight_passes(passes)
    assert len(calls) == 3


@pytest.mark.skipif(not hasattr(torch.utils.checkpoint, "GraphExecGroup"), reason="torch is before 2.10")
def test_each_half_runs_a_recomputed_layer_once() -> None:
    calls: list[nn.Module] = []
    net = nn.Sequential(*(nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 4)) for _ in range(4)))
    net[0].register_forward_pre_hook(lambda layer, _: calls.append(layer))
    y = apply_activation_checkpoint(net, 2)(x := torch.randn(4, 4, requires_grad=True))
    passes = run_input_pass([y], [torch.ones_like(y)], [x])
    assert len(calls) == 2
    run_weight_passes(passes)
    assert len(calls) == 3
