"""Second derivatives of collectives inside a network, and the groups of ranks that they are for."""

from collections.abc import Callable
from typing import Any

import pytest
import torch

from ringspark.estimators.options.mesh import AXES
from ringspark.estimators.parallel.mesh import group_ranks
from ringspark.extras.model_parallel import communication
from ringspark.extras.model_parallel.fake_collective import FakeCollective

# Once differentiable operations, as functions of a tensor and a collective.
ONCE: dict[str, Callable[[torch.Tensor, Any], torch.Tensor]] = {
    "scattered": lambda x, collective: communication.reduce_scatter(x, 0, collective),
    "gathered for shards": lambda x, collective: communication.all_gather_for_shards(x, 0, collective, 10),
    "scaled": lambda x, _: communication.scale_gradient(x, 0.5),
}


@pytest.mark.parametrize("name", ONCE)
def test_second_derivatives_are_refused_where_they_would_be_wrong(name: str) -> None:
    """`test_network_losses` trains with the second derivatives of the other operations."""
    x = torch.arange(15.0).view(5, 3).requires_grad_()
    loss = ONCE[name](x, FakeCollective(0, 2)).pow(3).sum()
    (gradient,) = torch.autograd.grad(loss, x, create_graph=True)
    with pytest.raises(RuntimeError, match="differentiate twice"):
        gradient.square().sum().backward()


def test_the_groups_over_axes_hold_every_rank_once_and_neighbours_on_the_last_axis() -> None:
    sizes = dict.fromkeys(AXES, 1) | {"pipeline": 2, "data": 2, "tensor": 2}
    assert group_ranks(sizes, ["tensor"]) == [[0, 1], [2, 3], [4, 5], [6, 7]]
    assert group_ranks(sizes, ["pipeline"]) == [[0, 4], [1, 5], [2, 6], [3, 7]]
    assert group_ranks(sizes, ["data", "tensor"]) == [[0, 1, 2, 3], [4, 5, 6, 7]]
