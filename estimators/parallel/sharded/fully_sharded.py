"""ZeRO stage 3 by torch's FSDP2: each rank keeps its shard of weights, gradients and optimizer state.

Rajbhandari et al. 2020; Zhao et al. 2023, "PyTorch FSDP". Each block of the network's longest chain is a
unit. Every rank runs the same units in the same order, once for each micro-batch that any rank may have. A
rank without rows runs one row of zeros. A network must not skip a block on some ranks only.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import partial
from typing import Any
from uuid import uuid4

import torch
from torch import nn

from ringspark.estimators.collectives.base import Collective, num_bytes
from ringspark.estimators.collectives.torch_collective import TorchCollective
from ringspark.estimators.options.mesh import AXES
from ringspark.estimators.parallel.base import (
    GradientSync,
    MakeOptimizer,
    SyncSettings,
    keep_buffers,
    share_weights,
)
from ringspark.estimators.parallel.empty_passes import EmptyPasses
from ringspark.estimators.parallel.initial_weights import is_deferred, send_initial_weights
from ringspark.estimators.parallel.layout import layout_of
from ringspark.estimators.parallel.mesh import RankMesh, ShardGroup
from ringspark.estimators.parallel.optimizer_state import OptimizerState, RootOf, first_rank
from ringspark.estimators.parallel.sharded.parameter_shards import check_optimizer
from ringspark.models.activation_checkpoint import Chain, chain_blocks
from ringspark.models.outputs import as_outputs


def _device_mesh(mesh: RankMesh, device: torch.device) -> Any:
    """Returns torch's mesh of the ranks that sum this rank's gradients, over process groups that exist.

    With an axis `shard` it has two dimensions: ranks with the same shards, and ranks with different shards.
    """
    from torch.distributed.device_mesh import DeviceMesh

    # torch caches results of operators on DTensors, such as this rank's shape, by the ranks and names of the
    # mesh, but not by this rank. A reused Python worker may have another rank now, so names are never reused.
    copies_name, parts_name = (f"{name}_{uuid4().hex}" for name in ("copies", "parts"))
    copies, parts, all_ranks = mesh.shard_group.replicas, mesh.shard_group.shards, mesh.shard_group.all
    if parts.size == all_ranks.size:
        return DeviceMesh.from_group(_process_group(all_ranks), device.type, mesh_dim_names=(parts_name,))
    ranks = torch.arange(mesh.world.size).reshape([mesh.sizes[axis] for axis in AXES])
    order = ("pipeline", "tensor", "data", "expert", "sequence", "shard")
    ranks = ranks.permute([AXES.index(axis) for axis in order]).reshape(-1, copies.size, parts.size)
    return DeviceMesh.from_group(
        [_process_group(copies), _process_group(parts)],
        device.type,
        mesh=next(each for each in ranks if mesh.world.rank in each),
        mesh_dim_names=(copies_name, parts_name),
    )


def _process_group(ranks: Collective) -> Any:
    from torch.distributed import group

    assert isinstance(ranks, TorchCollective)
    return ranks.group or group.WORLD


def _clear_caches() -> None:
    """Frees what torch caches by the names of this gang's mesh, which no later mesh has."""
    with suppress(ImportError):  # a private name; without it, only memory is lost
        from torch.distributed.tensor.debug import _clear_sharding_prop_cache

        _clear_sharding_prop_cache()  # type: ignore[no-untyped-call]


def shard_units(module: nn.Module, device_mesh: Any) -> list[nn.Module]:
    """Shards the module's parameters, in place; returns the units, the module itself last."""
    try:
        from torch.distributed.fsdp import FSDPModule, fully_shard
    except ImportError:
        FSDPModule = nn.Module  # type: ignore[misc, assignment]
    if not hasattr(FSDPModule, "set_reduce_scatter_unused_params"):
        raise ValueError(
            f"sync=Zero(stage=3) needs torch 2.13 or newer, got {torch.__version__}; upgrade torch, or "
            "set sync=Zero(stage=2)"
        )
    for name, parameter in module.named_parameters():
        if not parameter.dim():
            raise ValueError(
                f"sync=Zero(stage=3) cannot shard the scalar parameter {name!r}; give it shape (1,), or "
                "set sync=Zero(stage=2)"
            )
        parameter.data = parameter.data.contiguous()
    units = [*blocks_of(module), module]
    for unit in units:
        sharded: Any = fully_shard(unit, mesh=device_mesh)
        sharded.set_reduce_scatter_unused_params(True)
        # Sum gradients. To average them, the loss would need a factor, which overflows earlier in fp16.
        sharded.set_gradient_divide_factor(1.0)
        sharded.set_force_sum_reduction_for_comms(True)
    return units


def blocks_of(module: nn.Module) -> list[nn.Module]:
    """Returns the blocks of the longest chain that share no parameters with other modules.

    A chain is an `nn.Sequential`, or an `nn.ModuleList` of modules that have children; of equally long
    chains, the outermost counts. Returns an empty list if no chain has two blocks.
    """
    chains = [chain for chain in module.modules() if isinstance(chain, Chain) and chain is not module]
    best: list[nn.Module] = max(map(chain_blocks, chains), key=len, default=[])
    if len(best) < 2:
        best = chain_blocks(module) if isinstance(module, nn.Sequential) else []
    uses = _uses(module)

    def stands_alone(block: nn.Module) -> bool:
        inside = _uses(block)
        # If a block were in the chain twice, it would be freed after its first use in the backward pass.
        is_once = sum(block in set(other.modules()) for other in best) == 1
        return bool(inside) and is_once and all(uses[p] == n for p, n in inside.items())

    return [module for block in best for module in _callables(block) if stands_alone(module)]


def _uses(module: nn.Module) -> Counter[nn.Parameter]:
    return Counter(parameter for owner in module.modules() for parameter in owner.parameters(recurse=False))


def _callables(block: nn.Module) -> list[nn.Module]:
    """Returns the block, or its items if it has no `forward`, such as an item of a list of lists."""
    if type(block).forward is not nn.Module.forward:
        return [block]
    return [module for child in block.children() for module in _callables(child)]


class FsdpSync(EmptyPasses):
    """Adds to FSDP2 the cases that it lacks: ranks without rows and unused parameters."""

    def __init__(
        self,
        network: nn.Module,
        optimizer: torch.optim.Optimizer,
        units: Sequence[nn.Module],
        shard_group: ShardGroup,
        rounds: int,
    ) -> None:
        super().__init__(network, optimizer)
        collective = shard_group.all
        collective.operations.sees_all = False
        self.ranks_differ = True
        self._collective, self._parts = collective, shard_group.shards
        self._units: list[Any] = list(units)
        self._named = dict(network.named_parameters())
        self._index = {name: index for index, name in enumerate(self._named)}
        self._had = [0.0] * len(self._named)
        self._has_rows = True
        self._hooked: set[int] = set()
        names = {parameter: name for name, parameter in self._named.items()}
        for unit in units:
            own = _own_parameters(unit, [u for u in units if u is not unit], names)
            # This hook runs after FSDP2's own hook, which sets the whole parameters.
            unit.register_forward_pre_hook(partial(self._on_forward, own, unit is network))
        self.add_empty_passes(rounds)

    @classmethod
    def prepare(
        cls, module: nn.Module, make_optimizer: MakeOptimizer, mesh: RankMesh, settings: SyncSettings
    ) -> GradientSync:
        ranks = mesh.shard_group.all
        if not is_deferred(module):
            share_weights(module, mesh)
        units = []
        if ranks.size > 1:
            mesh.world.on_leave(_clear_caches)
            flags = {name: vars(parameter) for name, parameter in module.named_parameters()}
            units = shard_units(module, _device_mesh(mesh, settings.device))
            for name, parameter in module.named_parameters():
                vars(parameter).update(flags[name])  # an optimizer function may read a user's attributes
        if is_deferred(module):
            send_initial_weights(module, mesh, settings.device)
        optimizer = make_optimizer(module)
        if ranks.size == 1:
            return GradientSync(module, optimizer)
        check_optimizer(optimizer, settings.sync)
        return cls(module, optimizer, units, mesh.shard_group, settings.micro_batches)

    def _on_forward(
        self, own: list[tuple[nn.Module, str, str]], is_root: bool, module: nn.Module, inputs: object
    ) -> None:
        whole = []
        for owner, attribute, name in own:
            parameter = owner._parameters[attribute]
            assert parameter is not None
            whole.append(parameter)
            # FSDP2 makes the whole parameters once; later it only frees their memory.
            if parameter.requires_grad and id(parameter) not in self._hooked:
                self._hooked.add(id(parameter))
                hook = partial(self._on_gradient, self._index[name])
                parameter.register_post_accumulate_grad_hook(hook)  # type: ignore[no-untyped-call]
        size, traffic = self._parts.size, self._parts.traffic
        parts = [num_bytes(whole) // size] * size
        traffic.all_gather(parts)
        if torch.is_grad_enabled():
            if not is_root:
                traffic.all_gather(parts)  # again in the backward pass
            parts = [num_bytes(p for p in whole if p.requires_grad) // size] * size
            traffic.reduce_scatter(parts)

    def _on_gradient(self, index: int, parameter: torch.Tensor) -> None:
        if self._has_rows:
            self._had[index] = 1.0
        else:
            # FSDP2 then uses zeros. The gradients of a row of zeros may be anything, even NaN.
            parameter.grad = None

    def forward_without_rows(self, inputs: Sequence[torch.Tensor]) -> None:
        with torch.no_grad():
            self.network(*(_row(values) for values in inputs))

    def _run_without_rows(self) -> None:
        """Runs a pass over a row of zeros, for its collective calls; gradients and buffers do not change."""
        device = next(iter(self._named.values())).device
        self._has_rows = False
        try:
            gpus = [device] if device.type == "cuda" else []
            with keep_buffers(self.network), torch.random.fork_rng(devices=gpus):
                outputs = as_outputs(self.module(*(_row(values) for values in self._like)))
                sum(output.sum() for output in outputs).backward()  # type: ignore[union-attr]
        finally:
            self._has_rows = True

    def reduce(self, scale: Callable[[], float] = lambda: 1.0) -> None:
        super().reduce(scale)
        device = next(iter(self._named.values())).device
        counts = self._collective.all_reduce(torch.tensor(self._had, device=device)).tolist()
        for parameter, count in zip(self._named.values(), counts, strict=True):
            if not count:
                parameter.grad = None
        self._had = [0.0] * len(self._had)

    @torch.no_grad()
    def clip_gradients(self, max_norm: float) -> None:
        layout = layout_of(self.network)
        if layout is None:
            super().clip_gradients(max_norm)
            return
        # Each element counts once over all ranks.
        total = torch.zeros(1, dtype=torch.double)
        gradients = []
        for name, parameter in self._named.items():
            if parameter.grad is None:
                continue
            own: Any = parameter.grad
            gradients.append(own.to_local())
            if layout.is_counted(name, ["tensor"]):
                total += torch.linalg.vector_norm(gradients[-1]).double().square().cpu()
        total = self._parts.all_reduce(total)
        if layout.mesh.coordinates["sequence"]:
            total.zero_()  # the first rank of the axis adds the same sum
        norm = layout.mesh.holders.all_reduce(total)[0].sqrt()
        factor = (max_norm / (norm + 1e-6)).clamp(max=1.0)
        for gradient in gradients:
            gradient.mul_(factor.to(gradient.device, gradient.dtype))

    def optimizer_state(self, root_of: RootOf = first_rank) -> OptimizerState:
        self._free_whole()
        return super().optimizer_state(root_of)

    def load_optimizer_state(self, state: OptimizerState) -> None:
        self._free_whole()
        super().load_optimizer_state(state)

    def _free_whole(self) -> None:
        # After an evaluation the last unit still has its whole parameters, not the optimizer's.
        for unit in self._units:
            unit.reshard()


def _own_parameters(
    unit: nn.Module, others: Sequence[nn.Module], names: dict[nn.Parameter, str]
) -> list[tuple[nn.Module, str, str]]:
    """Returns (module, attribute, name in the network) for each parameter that only this unit has."""
    inner = {m for other in others if other in set(unit.modules()) for m in other.modules()}
    return [
        (owner, attribute, names[parameter])
        for owner in unit.modules()
        if owner not in inner
        for attribute, parameter in owner._parameters.items()
        if parameter is not None
    ]


def _row(values: torch.Tensor) -> torch.Tensor:
    return values.new_zeros((1, *values.shape[1:]))
