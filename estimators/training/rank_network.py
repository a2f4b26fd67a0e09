"""Makes the network of one rank: builds it, shards it, and wraps it with its optimizer.

The steps are methods in the order of their calls. Each runs on every rank.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import partial

import torch
from torch import nn
from torch.nn.parameter import UninitializedParameter

from ringspark.estimators.options.sync import Zero
from ringspark.estimators.parallel import STRATEGIES, Exchange
from ringspark.estimators.parallel.base import GradientSync, PlainSync, refuse_sparse
from ringspark.estimators.parallel.first_weights import give_first_weights, put_off, waits
from ringspark.estimators.parallel.mesh import RankMesh
from ringspark.estimators.parallel.model.expert_sum import ExpertSum
from ringspark.estimators.parallel.model.pipeline.passes import PipelinePasses
from ringspark.estimators.parallel.model.sharded import sharded
from ringspark.estimators.parallel.model.spread import partial_gradients, spread
from ringspark.estimators.parallel.sharded.fully_sharded import FullySharded
from ringspark.estimators.training.build import build_configured_optimizer, build_module
from ringspark.estimators.training.check.probe import probe, samples
from ringspark.estimators.training.checkpoint.rank_zero import RankZeroSection
from ringspark.estimators.training.finetuning.pretrained import load_pretrained
from ringspark.estimators.training.phase import Status
from ringspark.estimators.training.precision import autocast, keep_norms_fp32
from ringspark.estimators.training.settings.config import TrainConfig, UserObjects, segment_policy
from ringspark.models import apply_activation_checkpoint
from ringspark.models.batch_norm import accept_single_rows
from ringspark.models.deferred_init import defer_initialization
from ringspark.models.generators import seed_constructor
from ringspark.models.meta_device import copy_to_meta, find_changed_buffers
from ringspark.models.recompute.activation_checkpoint import block_names
from ringspark.pipelines import ShardManifest


class RankNetwork:
    """The network of one rank.

    Attributes:
        module: The whole network after `build`, this rank's shard of it after `shard`.
        pipeline: Passes through the stages of a pipeline; None without one.
    """

    module: nn.Module
    pipeline: PipelinePasses | None = None

    def __init__(
        self,
        config: TrainConfig,
        objects: UserObjects,
        manifest: ShardManifest,
        mesh: RankMesh,
        device: torch.device,
        status: Status,
    ) -> None:
        self._config, self._objects, self._manifest = config, objects, manifest
        self._mesh, self._device, self._status = mesh, device, status
        self._start_state: nn.Module | None = None

    def build(self) -> None:
        """Builds the whole network, with pretrained weights on rank 0; initialization may be deferred."""
        config, objects = self._config, self._objects
        self._status.phase = "building the model"
        seed_constructor(config.seed)
        found = (
            defer_initialization(partial(build_module, config, objects)) if config.builds_in_parts else None
        )
        if found is None:
            module = build_module(config, objects)
        else:
            module, first = found
            put_off(module, first)
        if any(isinstance(p, UninitializedParameter) for p in module.parameters()):
            # A first pass initializes lazy layers, as on the driver.
            probe(module, config, self._manifest, objects)
        if config.pretrained is not None:
            self._status.phase = "loading the pretrained weights"
            section = RankZeroSection(self._mesh, self._status.tick)
            if self._mesh.writes:
                # The other ranks receive them with the initial weights.
                load_pretrained(config.pretrained, module, section.progress)
            section.end()
        if not waits(module):
            module = module.to(self._device)
        accept_single_rows(module)
        if config.precision != "fp32":
            keep_norms_fp32(module)
        self.module = module

    def shard(self) -> None:
        """Keeps this rank's shard of the network, if the mesh shards it, and initializes deferred weights."""
        config, mesh, module = self._config, self._mesh, self.module
        self._blocks = block_names(module)
        if mesh.cuts_network:
            self._status.phase = "cutting the network"
            if not waits(module):
                with torch.no_grad():
                    mesh.world.broadcast(list(module.state_dict().values()))
            sample = None
            if self._objects.transform_batch is None:
                sample = samples(config.input_columns, self._manifest)
            accumulation = config.gradient_accumulation
            self.pipeline = spread(module, mesh, config.parallelism, accumulation, sample, self._device)
            if waits(module) and config.sync.sharding != "parameters":
                give_first_weights(module, mesh, self._device)
        # After `spread`, which refuses gradient hooks, because this call adds some.
        self._refuse_sparse_gradients()
        if not mesh.cuts_network:  # a shard of a network holds connections, which cannot be copied
            self._start_state = copy_to_meta(module)

    def recompute(self) -> None:
        """Applies `gradientCheckpointing`."""
        policy = segment_policy(self._config.gradient_checkpointing)
        if self.pipeline is not None:
            policy = _select_stage_policy(policy, self._blocks, self.module)
        apply_activation_checkpoint(self.module, policy)

    def wrap(self) -> GradientSync:
        """Makes the optimizer and the gradient synchronization with the other ranks."""
        self._status.phase = "sharing the first weights"
        sync = wrap_network(self._config, self._objects, self.module, self._mesh, self._device)
        sync.progress = self._status.tick
        # Ranks hold different gradient shards, so they must agree on overflow.
        sync.ranks_differ |= self._mesh.cuts_network
        return sync

    def find_changed_buffers(self) -> tuple[str, ...]:
        """Returns the names of state that the training has changed and a checkpoint does not hold."""
        return (
            () if self._start_state is None else tuple(find_changed_buffers(self._start_state, self.module))
        )

    def _refuse_sparse_gradients(self) -> None:
        """Makes embeddings give dense gradients if a rank does not hold the gradients of whole rows."""
        config, module = self._config, self.module
        # These two strategies send rows of embeddings, and refuse other sparse gradients themselves.
        if config.num_workers == 1 or config.sync.strategy in ("data_parallel", "compressed"):
            return
        for layer in module.modules():
            if isinstance(layer, nn.Embedding | nn.EmbeddingBag):
                layer.sparse = False
        for name, parameter in module.named_parameters():
            if parameter.requires_grad:
                parameter.register_hook(partial(refuse_sparse, name))  # type: ignore[no-untyped-call]


Policy = str | int | tuple[str, ...]


def _select_stage_policy(policy: Policy, blocks: Sequence[str], stage: nn.Module) -> Policy:
    """Returns the activation checkpointing policy of one rank's stages, which may have one block or none.

    Args:
        policy: Policy of the whole network.
        blocks: `block_names` of the whole network.
    """
    known = {name for name, _ in stage.named_modules(remove_duplicate=False)}
    here = tuple(name for name in blocks if name in known)
    if isinstance(policy, tuple):
        return tuple(name for name in policy if name in known) or "none"
    if policy == "all":
        return here or "none"
    # The last segment of blocks keeps its activations, so a single block has nothing to recompute.
    if len(here) < 2:
        return "none"
    return min(policy, len(here)) if isinstance(policy, int) else policy


def wrap_network(
    config: TrainConfig, objects: UserObjects, module: nn.Module, mesh: RankMesh, device: torch.device
) -> GradientSync:
    """Makes the optimizer of a rank's shard, and its gradient synchronization with the other ranks."""
    exchange, sharding = _exchange(config), config.sync.sharding
    make = partial(build_configured_optimizer, config, objects)
    around = partial(autocast, config.precision, device)
    is_staged = mesh.sizes["pipeline"] > 1
    # A pipeline runs its passes without rows itself.
    passes = 0 if is_staged else config.gradient_accumulation
    is_frozen = not any(p.requires_grad for p in module.parameters())
    if mesh.sizes["expert"] > 1 and sharding == "none" and not (is_staged and is_frozen):
        return ExpertSum(module, make(module), mesh, rounds=passes, around=around)
    if is_frozen:
        # The whole stage is frozen, on all ranks that have it.
        return PlainSync(module, make(module))
    is_partial = partial_gradients(module) is not None
    if (is_staged or is_partial) and sharding == "gradients":
        # Gradients must not be sent in the backward pass of a micro-batch: other stages, or ranks with other
        # tokens, add theirs at the end, and a schedule may release them after the next step's passes.
        exchange, sharding = replace(exchange, sync=Zero(stage=1)), "optimizer"
    if sharding == "parameters" and (mesh.cuts_network or mesh.sizes["shard"] > 1 or waits(module)):
        return FullySharded().over(module, make, mesh, exchange, device)
    if sharding != "none" and (mesh.sizes["expert"] > 1 or mesh.sizes["shard"] > 1):
        return sharded(
            module,
            make,
            mesh,
            passes=passes,
            micro_batches=exchange.micro_batches,
            during_backward=sharding == "gradients",
            around=around,
        )
    return STRATEGIES[exchange.sync.strategy]().prepare(module, make, mesh.gradients, exchange)


def _exchange(config: TrainConfig) -> Exchange:
    return Exchange(
        sync=config.sync,
        micro_batches=config.gradient_accumulation,
        noise_scale=config.noise_scale,
        seed=config.seed,
        timeout_seconds=config.timeout_seconds,
    )
