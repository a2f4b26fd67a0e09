"""Turns a whole network into this rank's part of it, by the mesh."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from ringspark.estimators.options.mesh import Mesh
from ringspark.estimators.parallel.cut import Cut
from ringspark.estimators.parallel.layout import ModelLayout, layout_of
from ringspark.estimators.parallel.mesh import RankMesh
from ringspark.estimators.parallel.model.expert import spread_experts
from ringspark.estimators.parallel.model.pipeline.cutting import cut_by_names, cut_stages
from ringspark.estimators.parallel.model.pipeline.passes import PipelineOptions, PipelinePasses, pipelined
from ringspark.estimators.parallel.model.pipeline.schedules import schedule_of
from ringspark.estimators.parallel.model.pipeline.sections import goes_along_time
from ringspark.estimators.parallel.model.sequence.spread import check_sequence, spread_sequence
from ringspark.estimators.parallel.model.tensor import (
    MeshGrids,
    PartialGradients,
    PartRows,
    check_parts,
    plan_of,
    region_of,
    spread_between,
    spread_tensor,
)
from ringspark.models.chain import links_of
from ringspark.models.module_hooks import find_hook, has_gradient_hook


@dataclass(frozen=True)
class _Seat:
    """The last rank of an axis, which has the smallest parts; it is asked for nothing but its place."""

    rank: int
    size: int


def check_spread(module: nn.Module, sizes: Mapping[str, int], options: Mesh) -> None:
    """Refuses, on the driver, a network that cannot be cut so.

    Args:
        module: The whole network, or one without weights; it is changed.
        sizes: Number of ranks along each axis.
        options: The setting `parallelism`.

    Raises:
        ValueError: It cannot be cut that way.
    """
    _check_hooks(module, sizes, options)
    if sizes["tensor"] > 1:
        plan = options.plan or plan_of(module, sizes["tensor"])
        between = "parts" if options.sequence_parallel else "whole"
        if options.sequence_parallel:
            check_parts(module, sizes)
        seat: Any = _Seat(sizes["tensor"] - 1, sizes["tensor"])
        spread_tensor(module, region_of(seat, between), plan)
    if sizes["pipeline"] > 1:
        way = options.pipeline
        owners = schedule_of(way.schedule, way.virtual).owners(sizes["pipeline"], way.virtual)
        links = links_of(module)
        if way.cuts:
            cut_by_names(links, len(owners), way.cuts)
        else:
            cut_stages(links, len(owners), [1.0] * len(links))
        if way.sequence_chunks > 1 and not goes_along_time(links):
            raise ValueError(
                "Pipeline's sequence_chunks needs a network with links that go along time one after the "
                f"other, such as 'recurrent', and {type(module).__name__} has none; give its links "
                "over_time, as ringspark.models.chain describes, or leave sequence_chunks out"
            )
    if sizes["expert"] > 1:
        last: Any = _Seat(sizes["expert"] - 1, sizes["expert"])
        spread_experts(module, last)
    if sizes["sequence"] > 1:
        check_sequence(module, options.context)


def spread(
    module: nn.Module,
    mesh: RankMesh,
    options: Mesh,
    num_micro: int = 1,
    sample: Sequence[torch.Tensor] | None = None,
    device: torch.device | None = None,
) -> PipelinePasses | None:
    """Leaves this rank's part of the network, in place. Runs on every rank.

    Args:
        module: The whole network, with equal weights on all ranks.
        options: The setting `parallelism`.
        num_micro: Micro-batches of a step.
        sample: Arguments of one micro-batch, by which the cost of blocks is measured.

    Returns:
        What runs the stages of a pipeline; None where there is none.

    Raises:
        ValueError: The network cannot be cut that way.
    """
    _check_hooks(module, mesh.sizes, options)
    shapes = {name: tensor.shape for name, tensor in module.state_dict().items()}
    trained = [name for name, parameter in module.named_parameters() if parameter.requires_grad]
    tied = _tied_names(module)
    cuts: dict[str, Cut] = {}
    if mesh.sizes["tensor"] > 1:
        plan = options.plan or plan_of(module, mesh.sizes["tensor"])
        region = region_of(
            mesh.axes["tensor"], "parts" if options.sequence_parallel else "whole", MeshGrids(mesh)
        )
        cuts |= spread_tensor(module, region, plan)
    if mesh.sizes["expert"] > 1:
        cuts |= spread_experts(module, mesh.axes["expert"])
    if mesh.sizes["sequence"] > 1:
        spread_sequence(module, mesh.axes["sequence"], options.context)
    if mesh.sizes["tensor"] > 1:
        spread_between(module, region)
    pipeline = None
    if mesh.sizes["pipeline"] > 1:
        chosen = PipelineOptions(
            schedule=options.pipeline.schedule,
            virtual=options.pipeline.virtual,
            cuts=options.pipeline.cuts,
            num_micro=num_micro,
            time_chunks=options.pipeline.sequence_chunks,
        )
        # Layers that are cut already would exchange in the measure, which one rank runs alone.
        is_cut = bool(cuts) or mesh.sizes["sequence"] > 1
        pipeline = pipelined(module, mesh, chosen, None if is_cut else sample, device)
    copies = frozenset() if pipeline is None else frozenset(pipeline.copies)
    ModelLayout(module, mesh, cuts, shapes, copies, trained, tied)
    return pipeline


def _check_hooks(module: nn.Module, sizes: Mapping[str, int], options: Mesh) -> None:
    """Refuses hooks that a pipeline would not run, or would run once per stage.

    Raises:
        ValueError: The network has such a hook.
    """
    if sizes["pipeline"] == 1:
        return
    name = type(module).__name__
    if hook := find_hook(module):
        raise ValueError(
            f"model {name} has {hook}, which a pipeline would run once per stage, on the stage's own "
            "inputs; put it on a layer, or in a method that links() returns"
        )
    schedule = options.pipeline.schedule
    is_delayed = schedule_of(schedule, options.pipeline.virtual).is_delayed
    if is_delayed and has_gradient_hook(module):
        raise ValueError(
            f"model {name} has gradient hooks on its weights, which schedule {schedule!r} does not run, "
            "because it differentiates copies of the weights; set schedule='1f1b', or remove the hooks"
        )


def partial_gradients(module: nn.Module) -> PartialGradients | None:
    """Returns what sums the gradients of which ranks along 'tensor' have parts; None where they are whole."""
    layout = layout_of(module)
    if layout is None or not isinstance(getattr(module, "rows", None), PartRows):
        return None
    return PartialGradients(module, tuple(layout.cuts), layout.mesh.axes["tensor"])


def _tied_names(module: nn.Module) -> dict[str, str]:
    """Returns the further names of tied parameters, each with the first one."""
    firsts = {parameter: name for name, parameter in module.named_parameters()}
    every = module.named_parameters(remove_duplicate=False)
    return {name: firsts[parameter] for name, parameter in every if firsts[parameter] != name}
