"""Turns a whole network into this rank's part of it, by the mesh."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from torch import nn

from ringspark.estimators.parallel.mesh import Mesh
from ringspark.estimators.parallel.model.cut import Cut
from ringspark.estimators.parallel.model.layout import ModelLayout
from ringspark.estimators.parallel.model.tensor import plan_of, spread_tensor


@dataclass(frozen=True)
class _Seat:
    """The last rank of an axis, which has the smallest parts; it is asked for nothing but its place."""

    rank: int
    size: int


def check_spread(module: nn.Module, sizes: Mapping[str, int], options: Mapping[str, Any]) -> None:
    """Refuses, on the driver, a network that cannot be cut so.

    Args:
        module: The whole network, or one without weights; it is changed.
        sizes: Number of ranks along each axis.
        options: The setting `parallelism`.

    Raises:
        ValueError: It cannot be cut that way.
    """
    if sizes["tensor"] > 1:
        plan = options.get("plan") or plan_of(module, sizes["tensor"])
        seat: Any = _Seat(sizes["tensor"] - 1, sizes["tensor"])
        spread_tensor(module, seat, plan)


def spread(module: nn.Module, mesh: Mesh, options: Mapping[str, Any]) -> nn.Module:
    """Returns what this rank has of the network; in place, so the whole one is gone. Runs on every rank.

    Args:
        module: The whole network, with equal weights on all ranks.
        options: The setting `parallelism`.

    Raises:
        ValueError: The network cannot be cut that way.
    """
    shapes = {name: tensor.shape for name, tensor in module.state_dict().items()}
    cuts: dict[str, Cut] = {}
    if mesh.sizes["tensor"] > 1:
        plan = options.get("plan") or plan_of(module, mesh.sizes["tensor"])
        cuts |= spread_tensor(module, mesh.axes["tensor"], plan)
    ModelLayout(module, mesh, cuts, shapes)
    return module
