"""Turns a whole network into this rank's part of it, by the mesh."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import nn

from ringspark.estimators.parallel.mesh import Mesh
from ringspark.estimators.parallel.model.cut import Cut
from ringspark.estimators.parallel.model.layout import ModelLayout
from ringspark.estimators.parallel.model.tensor import plan_of, spread_tensor


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
