"""Tries a user's plan on the driver: whether the network still runs where one rank has its parts alone.

A plan of a user's own may cut a layer whose outputs the next one wants whole. What that does to the shapes
shows without a number and without another rank; what it does to numbers of the right shape does not.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import nn

from ringspark.estimators.parallel.model.stand_in import StandIn
from ringspark.estimators.parallel.model.tensor.plan import region_of, spread_tensor
from ringspark.models.outputs import as_outputs
from ringspark.models.skeleton import skeleton

_REMEDY = (
    "a layer cut by 'column' passes on its part of the outputs, and only one cut by 'row' takes a part: name "
    "both layers of each pair, or take 'column_joined'"
)


def check_own_plan(
    module: nn.Module, num_ranks: int, plan: Mapping[str, Any], inputs: Sequence[torch.Tensor]
) -> None:
    """Refuses a plan under which a rank's part of the network fails, or returns other shapes.

    Args:
        module: The whole network; it is not changed.
        plan: As `spread_tensor` takes it.
        inputs: Arguments of `forward`.

    Raises:
        ValueError: The whole network runs on such inputs, and a rank's part does not do the same.
    """
    name = type(module).__name__
    whole = _shapes(skeleton(module), inputs)
    if isinstance(whole, Exception):
        return  # the network wants numbers, which are not there to be had
    part = skeleton(module)
    stand_in: Any = StandIn(0, num_ranks)
    spread_tensor(part, region_of(stand_in), plan)
    found = _shapes(part, inputs)
    if isinstance(found, Exception):
        told = f"{type(found).__name__}: {found}"
        raise ValueError(f"model {name} cut by parallelism's plan does not run ({told}); {_REMEDY}")
    if found != whole:
        raise ValueError(
            f"model {name} cut by parallelism's plan returns shapes {found}, and whole {whole}; {_REMEDY}"
        )


def _shapes(module: nn.Module, inputs: Sequence[torch.Tensor]) -> list[tuple[int, ...]] | Exception:
    """Returns the shapes of a forward pass on tensors without numbers, or what it raised."""
    module.eval()
    try:
        with torch.no_grad():
            output = module(*(tensor.to("meta") for tensor in inputs))
        return [tuple(tensor.shape) for tensor in as_outputs(output, "the network")]
    except Exception as error:
        return error
