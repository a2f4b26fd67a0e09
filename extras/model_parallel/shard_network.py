"""Turns a whole network into this rank's shard of it, by the mesh."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import nn

from ringspark.estimators.options.mesh import Mesh
from ringspark.estimators.parallel.layout import ModelLayout
from ringspark.estimators.parallel.mesh import RankMesh
from ringspark.estimators.parallel.shard_spec import ShardSpec
from ringspark.extras.model_parallel import communication
from ringspark.extras.model_parallel.expert import shard_experts
from ringspark.extras.model_parallel.fake_collective import FakeCollective
from ringspark.extras.model_parallel.pipeline.partition import partition_by_cost, partition_by_names
from ringspark.extras.model_parallel.pipeline.passes import PipelinePasses, build_pipeline
from ringspark.extras.model_parallel.pipeline.schedules import schedule_of
from ringspark.extras.model_parallel.pipeline.sections import goes_along_time
from ringspark.extras.model_parallel.sequence.shard_sequence import check_sequence, shard_sequence
from ringspark.extras.model_parallel.tensor.grid import Grids, make_mesh_grids
from ringspark.extras.model_parallel.tensor.loss import scores_of
from ringspark.extras.model_parallel.tensor.plan import (
    check_sequence_parallel,
    make_region,
    plan_of,
    shard_activations,
    shard_layers,
)
from ringspark.extras.model_parallel.tensor.random_state import RankRandomState
from ringspark.extras.model_parallel.tensor.sequence_parallel import (
    SequenceShardedRows,
    add_partial_gradients,
)
from ringspark.models.chain import links_of
from ringspark.models.lora import find_adapters
from ringspark.models.module_hooks import find_hook, has_gradient_hook

# Axes inside a layer: all model axes except the pipeline.
LAYER_AXES = ("tensor", "expert", "sequence")


def check_shardable(module: nn.Module, sizes: Mapping[str, int], options: Mesh) -> None:
    """Raises ValueError, on the driver, if the mesh cannot shard the network; changes `module`."""
    _check_hooks(module, sizes, options)
    # The last rank of an axis has the smallest shards.
    last: dict[str, Any] = {axis: FakeCollective(size - 1, size) for axis, size in sizes.items()}
    if sizes["tensor"] > 1:
        plan = options.plan or plan_of(module, sizes["tensor"])
        if options.sequence_parallel:
            check_sequence_parallel(module, sizes)
        shard_layers(module, make_region(last["tensor"], options.sequence_parallel), plan)
    if sizes["pipeline"] > 1:
        way = options.pipeline
        owners = schedule_of(way.schedule, way.virtual).owners(sizes["pipeline"], way.virtual)
        links = links_of(module)
        if way.cuts:
            partition_by_names(links, len(owners), way.cuts)
        else:
            partition_by_cost(links, len(owners), [1.0] * len(links))
        if way.sequence_chunks > 1 and not goes_along_time(links):
            raise ValueError(
                "Pipeline's sequence_chunks needs two consecutive layers that support sequence chunks, as in "
                f"the model 'recurrent', but {type(module).__name__} has none; give its links "
                "a function `over_time`, as ringspark.models.chain describes, or leave sequence_chunks out"
            )
    if sizes["expert"] > 1:
        shard_experts(module, last["expert"])
    if sizes["sequence"] > 1:
        check_sequence(module, options.context)


def shard_network(
    module: nn.Module,
    mesh: RankMesh,
    options: Mesh,
    num_micro: int = 1,
    sample: Sequence[torch.Tensor] | None = None,
    device: torch.device | None = None,
) -> PipelinePasses | None:
    """Leaves this rank's shard in `module`; returns the rank's pipeline passes or None. Runs on every rank.

    `sample` are arguments of one micro-batch, to measure the cost of layers.
    """
    _check_hooks(module, mesh.sizes, options)
    shapes = {name: tensor.shape for name, tensor in module.state_dict().items()}
    trained = [name for name, parameter in module.named_parameters() if parameter.requires_grad]
    firsts = {parameter: name for name, parameter in module.named_parameters()}
    every = module.named_parameters(remove_duplicate=False)
    tied = {name: firsts[parameter] for name, parameter in every if firsts[parameter] != name}
    is_adapted = bool(find_adapters(module))
    inside = {axis: mesh.axes[axis] for axis in LAYER_AXES if mesh.sizes[axis] > 1}
    cuts = shard_inside(module, inside, options, make_mesh_grids(mesh))
    pipeline = None
    if mesh.sizes["pipeline"] > 1:
        # Only rank 0 measures, so layers that are sharded already must not communicate.
        is_cut = bool(cuts) or mesh.sizes["sequence"] > 1
        pipeline = build_pipeline(
            module, mesh, options.pipeline, num_micro, None if is_cut else sample, device
        )
    copies = frozenset[str]() if pipeline is None else pipeline.copies
    shared = {} if pipeline is None else pipeline.tied
    layout = ModelLayout(module, mesh, cuts, shapes, copies, trained, tied, is_adapted, shared)
    layout.class_shards = scores_of(module)
    layout.uncompiled = ((communication, "_apply"), (RankRandomState, "begin"), (RankRandomState, "end"))
    # Without sequence parallelism the gradients are complete.
    if isinstance(getattr(module, "rows", None), SequenceShardedRows):
        unsharded = [p for name, p in module.named_parameters() if name not in layout.cuts]
        layout.complete_gradients = partial(add_partial_gradients, unsharded, mesh.axes["tensor"])
    return pipeline


def shard_inside(
    module: nn.Module, axes: Mapping[str, Any], options: Mesh, grids: Grids | None = None
) -> dict[str, ShardSpec]:
    """Shards layers of `module`, or their rows; `axes` has the collective of each of `LAYER_AXES` in use."""
    cuts: dict[str, ShardSpec] = {}
    if tensor := axes.get("tensor"):
        region = make_region(tensor, options.sequence_parallel, grids)
        cuts |= shard_layers(module, region, options.plan or plan_of(module, tensor.size))
    if expert := axes.get("expert"):
        cuts |= shard_experts(module, expert)
    if sequence := axes.get("sequence"):
        shard_sequence(module, sequence, options.context)
    if tensor:
        shard_activations(module, region)
    return cuts


def _check_hooks(module: nn.Module, sizes: Mapping[str, int], options: Mesh) -> None:
    if sizes["pipeline"] == 1:
        return
    name = type(module).__name__
    if hook := find_hook(module):
        raise ValueError(
            f"model {name} has {hook}, which a pipeline would run once per stage, on the stage's own "
            "inputs; put it on a layer, or in a method that links() returns"
        )
    schedule = options.pipeline.schedule
    if schedule_of(schedule, options.pipeline.virtual).delays and has_gradient_hook(module):
        raise ValueError(
            f"model {name} has gradient hooks on its weights, which schedule {schedule!r} does not run, "
            "because it differentiates copies of the weights; set schedule='1f1b', or remove the hooks"
        )
