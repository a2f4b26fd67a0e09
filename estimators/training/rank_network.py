"""Makes the network of one rank: builds it, shards it, and wraps it with its optimizer."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

import torch
from torch import nn
from torch.nn.parameter import UninitializedParameter

from ringspark.estimators.parallel import STRATEGIES, SyncSettings, synchronize_gradients
from ringspark.estimators.parallel.base import GradientSync, refuse_sparse, share_weights
from ringspark.estimators.parallel.initial_weights import defer_weights, is_deferred, send_initial_weights
from ringspark.estimators.parallel.mesh import RankMesh
from ringspark.estimators.techniques import first_made, techniques_of
from ringspark.estimators.training.build import build_configured_optimizer, build_module
from ringspark.estimators.training.check.probe import probe, samples
from ringspark.estimators.training.checkpoint.rank_zero import RankZeroSection
from ringspark.estimators.training.finetuning.pretrained import load_pretrained, open_pretrained
from ringspark.estimators.training.optimizers.registry import TAKES_SPARSE
from ringspark.estimators.training.passes import Stages
from ringspark.estimators.training.phase import Status
from ringspark.estimators.training.precision import autocast, keep_norms_fp32
from ringspark.estimators.training.settings.config import TrainConfig, UserObjects, segment_policy
from ringspark.models import apply_activation_checkpoint
from ringspark.models.activation_checkpoint import block_names
from ringspark.models.adapters import find_library
from ringspark.models.batch_norm import accept_single_rows
from ringspark.models.deferred_init import defer_initialization
from ringspark.models.generators import seed_constructor
from ringspark.models.meta_device import Buffers, find_changed_buffers, unsaved_buffers
from ringspark.pipelines import ShardManifest


class RankNetwork:
    """The network of one rank. Every rank calls `build`, `shard`, `recompute` and `wrap`, in this order."""

    module: nn.Module
    stages: Stages | None = None

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
        self._start_state: Buffers = {}

    def build(self) -> None:
        """Builds the whole network, with pretrained weights on rank 0; initialization may be deferred."""
        config, objects = self._config, self._objects
        self._status.phase = "building the model"
        seed_constructor(config.seed)
        build, found = partial(build_module, config, objects), None
        if config.builds_in_parts:
            found = defer_initialization(build)
        if found is None:
            module = build()
        else:
            module, first = found
            defer_weights(module, first)
        if any(isinstance(p, UninitializedParameter) for p in module.parameters()):
            # A first pass initializes lazy layers, as on the driver.
            probe(module, config, self._manifest, objects)
        if config.start_weights is not None:
            self._status.phase = "loading the pretrained weights"
            section = RankZeroSection(self._mesh, self._status.tick)
            if self._mesh.writes:
                # The other ranks receive them with the initial weights.
                if found is None:
                    load_pretrained(config.start_weights, module, section.progress)
                else:
                    first = open_pretrained(config.start_weights, module, first, section.progress)
                    defer_weights(module, first)
            section.end()
            if found is not None and (buffers := [b for b in module.state_dict().values() if not b.is_meta]):
                self._mesh.world.broadcast(buffers)
        if not is_deferred(module):
            module = module.to(self._device)
        accept_single_rows(module)
        if (library := find_library(module)) is not None:
            library.stop_caching(module)
        if config.precision != "fp32":
            keep_norms_fp32(module)
        self.module = module

    def shard(self) -> None:
        """Keeps this rank's shard of the network, if the mesh shards it, and initializes deferred weights."""
        config, mesh, module = self._config, self._mesh, self.module
        self._blocks = block_names(module)
        if mesh.cuts_network:
            self._status.phase = "sharding the network"
            if not is_deferred(module):
                with torch.no_grad():
                    mesh.world.broadcast(list(module.state_dict().values()))
            sample = None
            if self._objects.transform_batch is None:
                sample = samples(config.input_columns, self._manifest)
            made = (each.shard(config, module, mesh, sample, self._device) for each in techniques_of(config))
            self.stages = first_made(made)
            if is_deferred(module) and config.sync.sharding != "parameters":
                send_initial_weights(module, mesh, self._device)
        # After the hook `shard` of a technique, which refuses gradient hooks: this call adds some.
        self._refuse_sparse_gradients()
        if not mesh.cuts_network:
            self._start_state = unsaved_buffers(module)

    def recompute(self) -> None:
        policy = segment_policy(self._config.gradient_checkpointing)
        if self.stages is not None:
            policy = _select_stage_policy(policy, self._blocks, self.module)
        apply_activation_checkpoint(self.module, policy)

    def wrap(self) -> GradientSync:
        self._status.phase = "sending the initial weights"
        sync = wrap_network(self._config, self._objects, self.module, self._mesh, self._device)
        sync.progress = self._status.tick
        return sync

    def find_changed_buffers(self) -> tuple[str, ...]:
        """Returns the names of buffers that training changed but a checkpoint does not hold."""
        if self._mesh.cuts_network:
            return ()
        return tuple(find_changed_buffers(self._start_state, unsaved_buffers(self.module)))

    def _refuse_sparse_gradients(self) -> None:
        """Sets `sparse=False` in embeddings if the strategy or the optimizer takes no sparse gradients.

        With several workers, a hook refuses any other sparse gradient.
        """
        config, module = self._config, self.module
        is_alone = config.num_workers == 1
        if is_alone:
            takes_sparse = config.optimizer in TAKES_SPARSE and not config.weight_decay
            takes_sparse = takes_sparse or self._objects.optimizer is not None
        else:
            takes_sparse = STRATEGIES[config.sync.strategy].takes_sparse
        if takes_sparse and not config.hides_rows:
            return
        for layer in module.modules():
            if isinstance(layer, nn.Embedding | nn.EmbeddingBag):
                layer.sparse = False
        if is_alone:
            return
        for name, parameter in module.named_parameters():
            if parameter.requires_grad:
                parameter.register_hook(partial(refuse_sparse, name))  # type: ignore[no-untyped-call]


Policy = str | int | tuple[str, ...]


def _select_stage_policy(policy: Policy, blocks: Sequence[str], stage: nn.Module) -> Policy:
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
    make = partial(build_configured_optimizer, config, objects)
    if config.has_own_step:
        share_weights(module, mesh)
        return GradientSync(module, make(module))  # `own_step` synchronizes the gradients
    settings = SyncSettings(
        sync=config.sync,
        micro_batches=config.gradient_accumulation,
        noise_scale=config.noise_scale,
        seed=config.seed,
        timeout_seconds=config.timeout_seconds,
        device=device,
        autocast=partial(autocast, config.precision, device),
    )
    sync = synchronize_gradients(module, make, mesh, settings)
    sync.make_optimizer = make
    return sync
