"""`train_worker`, which every rank runs, inside Spark or without it.

It takes plain arguments and needs no pyspark, so the same function serves a barrier task and a test.
"""

from __future__ import annotations

import json
from contextlib import ExitStack, closing
from dataclasses import asdict, dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.nn.parameter import UninitializedParameter

from ringspark.estimators import run_layout
from ringspark.estimators.collectives import Collective
from ringspark.estimators.parallel import STRATEGIES, Exchange
from ringspark.estimators.parallel.base import GradientSync, PlainSync, refuse_sparse
from ringspark.estimators.parallel.mesh import Mesh
from ringspark.estimators.parallel.model.expert_sum import ExpertSum
from ringspark.estimators.parallel.model.first_weights import give_first_weights, put_off, waits
from ringspark.estimators.parallel.model.sharded import sharded
from ringspark.estimators.parallel.model.spread import partial_gradients, spread
from ringspark.estimators.parallel.sharded.fully_sharded import FullySharded
from ringspark.estimators.training.batch_sizes import Steps
from ringspark.estimators.training.callbacks import Callbacks, TrainingState
from ringspark.estimators.training.checkpoint.resume import Recovery
from ringspark.estimators.training.checkpoint.solo import Solo
from ringspark.estimators.training.checkpoint.weights import save_together
from ringspark.estimators.training.compilation import compiled
from ringspark.estimators.training.driver_check import build_module, own_optimizer
from ringspark.estimators.training.history import EpochRecord, RunLog
from ringspark.estimators.training.kept_rows import caching
from ringspark.estimators.training.non_finite import NonFiniteStep
from ringspark.estimators.training.objective.heads import make_heads
from ringspark.estimators.training.observation.observed import Observation
from ringspark.estimators.training.optimizers.rate_scaling import RateScaling
from ringspark.estimators.training.optimizers.schedules import make_rates
from ringspark.estimators.training.phase import Status
from ringspark.estimators.training.precision import autocast, keep_norms_fp32
from ringspark.estimators.training.probe import probe, samples
from ringspark.estimators.training.run_notes import note_memory, note_start
from ringspark.estimators.training.running import Running
from ringspark.estimators.training.selection import BestCheckpoint, EarlyStopping
from ringspark.estimators.training.settings.config import TrainConfig, UserObjects, segment_policy
from ringspark.estimators.training.stage_recompute import policy_of_stage
from ringspark.estimators.training.trainer import Trainer
from ringspark.estimators.training.tuning.pretrained import load_pretrained
from ringspark.models import apply_activation_checkpoint
from ringspark.models.batch_norm import accept_single_rows
from ringspark.models.deferred import deferred
from ringspark.models.generators import seed_constructor, seed_rank, shared_generators_kept
from ringspark.models.recompute.activation_checkpoint import block_names
from ringspark.models.skeleton import changed_state, skeleton
from ringspark.pipelines import ShardManifest, open_reader, storage
from ringspark.pipelines.manifest import Split
from ringspark.pipelines.readers import ShardReader
from ringspark.pipelines.typed_json import parse_object, record


@dataclass(frozen=True, kw_only=True)
class TrainResult:
    """The result that returns through Spark: a few kilobytes, never weights.

    Attributes:
        seconds: Training time over all continuations, in seconds, without steps that a failure lost.
        resumed_steps: Optimizer steps from which the run was resumed.
        checkpoint_errors: One sentence per checkpoint that rank 0 could not write.
        non_finite: The first steps that `onNonFinite` handled.
    """

    run_uri: str
    checkpoint_uri: str
    checkpoint_epoch: int
    rows: int
    steps: int
    seconds: float
    bytes_sent: int
    lost_state: tuple[str, ...]
    stop_reason: str | None
    history: tuple[EpochRecord, ...]
    resumed_steps: tuple[int, ...] = ()
    checkpoint_errors: tuple[str, ...] = ()
    non_finite: tuple[NonFiniteStep, ...] = ()

    def to_json(self) -> str:
        return json.dumps(asdict(self))

    @classmethod
    def from_json(cls, text: str) -> TrainResult:
        return record(cls, parse_object(text, allow_nan=True))


def train_worker(
    config: TrainConfig,
    collective: Collective,
    objects: UserObjects | None = None,
    device: str = "cpu",
    status: Status | None = None,
) -> TrainResult:
    """Trains the config's model on the config's shards. Runs on every rank.

    Args:
        config: The training's settings, equal on all ranks.
        collective: Connected collective; stays open.
        objects: The user's module and callables for which the config has no name.
        device: This rank's torch device.
        status: Receives the phase that the rank is in.

    Returns:
        The history and the folder of the weights; equal on all ranks except for `seconds`.
    """
    objects = objects or UserObjects()
    status = status or Status()
    torch_device = torch.device(device)
    gpus = [torch_device] if torch_device.type == "cuda" else []
    mesh = Mesh.of(collective, config.axes)
    recovery = Recovery(config, mesh, status)
    # Seeds are set only inside the fork, so a reused Python worker keeps its own random state.
    with recovery, torch.random.fork_rng(devices=gpus), shared_generators_kept(), ExitStack() as opened:
        return _train(config, mesh, objects, torch_device, status, recovery, opened)


def _train(
    config: TrainConfig,
    mesh: Mesh,
    objects: UserObjects,
    device: torch.device,
    status: Status,
    recovery: Recovery,
    opened: ExitStack,
) -> TrainResult:
    status.phase = "opening the shards"
    manifest = ShardManifest.load(config.shards_uri)
    train, validation = _open_readers(config, mesh, manifest, opened)
    status.phase = "building the model"
    module = _build(config, objects, manifest, device, mesh, status)
    pipeline, blocks = None, block_names(module)
    if mesh.cuts_network:
        status.phase = "cutting the network"
        if not waits(module):
            with torch.no_grad():
                mesh.world.broadcast(list(module.state_dict().values()))
        sample = None if objects.transform_batch is not None else samples(config.input_columns, manifest)
        pipeline = spread(module, mesh, config.parallelism, config.gradient_accumulation, sample, device)
        if waits(module) and config.sharding != "parameters":
            give_first_weights(module, mesh, device)
    # After `spread`, which refuses gradient hooks, because this call adds some.
    _refuse_sparse_gradients(config, module)
    # A part of a network holds connections, which cannot be copied.
    start_state = None if mesh.cuts_network else skeleton(module)
    policy = segment_policy(config.gradient_checkpointing)
    if pipeline is not None:
        policy = policy_of_stage(policy, blocks, module)
    apply_activation_checkpoint(module, policy)
    status.phase = "sharing the first weights"
    exchange = _exchange(config)
    sync = _tied(config, objects, module, mesh, exchange, device)
    sync.progress = status.tick
    # Ranks with other parts of the gradients must agree on overflows.
    sync.ranks_differ |= mesh.cuts_network
    # Dropout differs between the ranks, like between the rows of one batch.
    seed_rank(config.seed, 0, mesh.drawing_rank)
    best = None
    if config.keep == "best":
        best = BestCheckpoint(config, mesh, status, keeps_worse=recovery.due.is_asked)
    heads = make_heads(config, objects, manifest)
    callbacks = _callbacks(config, objects, best)
    steps = Steps(config.batch_sizes, train.manifest.num_rows)
    # Made before a checkpoint is loaded, because the user's rates are the bases.
    schedule = objects.lr_schedule or config.lr_schedule
    scaling = RateScaling.of(config.scale_learning_rate, steps)
    rates = make_rates(schedule, sync.optimizer, steps.total, config.warmup_steps, scaling)
    start = note_start(config, mesh, manifest, device)
    status.phase = "comparing the clocks"
    with (
        RunLog(config.run_uri, writes=mesh.writes) as log,
        Observation.of(config, mesh, device, is_compiled=bool(config.compile)) as observation,
        compiled(sync.network, config.compile, device),
    ):
        running = Running(
            config,
            mesh,
            heads,
            sync,
            rates,
            callbacks,
            log,
            observation,
            steps,
            device,
            objects,
            pipeline,
        )
        Trainer(config, mesh, running, recovery, status).fit(train, validation)
    recovery.finish()
    state = running.state
    checkpoint_uri, checkpoint_epoch = _final_weights(config, mesh, state, best, status)
    bytes_sent = mesh.world.bytes_sent
    note_memory(config.run_uri, mesh, device, start)
    status.phase = "done"
    return TrainResult(
        run_uri=config.run_uri,
        checkpoint_uri=checkpoint_uri,
        checkpoint_epoch=checkpoint_epoch,
        rows=state.epoch * train.manifest.num_rows,
        steps=state.step,
        seconds=recovery.seconds,
        bytes_sent=bytes_sent,
        lost_state=() if start_state is None else tuple(changed_state(start_state, module)),
        stop_reason=state.stop_reason,
        history=tuple(state.history),
        resumed_steps=recovery.resumed_steps,
        checkpoint_errors=recovery.errors,
        non_finite=tuple(recovery.non_finite),
    )


def _tied(
    config: TrainConfig,
    objects: UserObjects,
    module: nn.Module,
    mesh: Mesh,
    exchange: Exchange,
    device: torch.device,
) -> GradientSync:
    """Ties this rank's part of the network to the others', and makes its optimizer. Runs on every rank."""
    make, around = partial(own_optimizer, config, objects), partial(autocast, config.precision, device)
    is_staged = mesh.sizes["pipeline"] > 1
    # Where a pipeline runs the passes, it runs those without rows too.
    passes = 0 if is_staged else config.gradient_accumulation
    is_frozen = not any(p.requires_grad for p in module.parameters())
    if mesh.sizes["expert"] > 1 and exchange.sharding == "none" and not (is_staged and is_frozen):
        return ExpertSum(module, make(module), mesh, rounds=passes, around=around)
    if is_frozen:
        # A stage that is frozen whole, on all ranks that have it.
        return PlainSync(module, make(module))
    is_partial = partial_gradients(module) is not None
    if (is_staged or is_partial) and exchange.sharding == "gradients":
        # Gradients must not leave in the backward pass of a micro-batch: other stages, or ranks that had
        # other tokens, add theirs at the end, and a schedule may release them after the next step's passes.
        exchange = replace(exchange, sharding="optimizer")
    if exchange.sharding == "parameters" and (mesh.cuts_network or mesh.sizes["shard"] > 1 or waits(module)):
        return FullySharded().over(module, make, mesh, exchange, device)
    if exchange.sharding != "none" and (mesh.sizes["expert"] > 1 or mesh.sizes["shard"] > 1):
        return sharded(
            module,
            make,
            mesh,
            passes=passes,
            micro_batches=exchange.micro_batches,
            during_backward=exchange.sharding == "gradients",
            around=around,
        )
    return STRATEGIES[exchange.strategy]().prepare(module, make, mesh.gradients, exchange)


def _exchange(config: TrainConfig) -> Exchange:
    """Returns the settings of the exchange between the ranks."""
    return Exchange(
        micro_batches=config.gradient_accumulation,
        sharding=config.sharding,
        compression=config.gradient_compression,
        noise_scale=config.noise_scale,
        seed=config.seed,
        consistency=config.consistency,
        timeout_seconds=config.timeout_seconds,
        local_steps=config.local_steps,
    )


def _build(
    config: TrainConfig,
    objects: UserObjects,
    manifest: ShardManifest,
    device: torch.device,
    mesh: Mesh,
    status: Status,
) -> nn.Module:
    seed_constructor(config.seed)
    found = deferred(partial(build_module, config, objects)) if config.builds_in_parts else None
    if found is None:
        module = build_module(config, objects)
    else:
        module, first = found
        put_off(module, first)
    if any(isinstance(p, UninitializedParameter) for p in module.parameters()):
        # A first pass initializes lazy layers, as on the driver.
        probe(module, config, manifest, objects)
    if config.pretrained is not None:
        status.phase = "loading the pretrained weights"
        solo = Solo(mesh, status.tick)
        if mesh.writes:
            # The other ranks get them when the first weights are shared.
            load_pretrained(config.pretrained, module, solo.progress)
        solo.end()
    if not waits(module):
        module = module.to(device)
    accept_single_rows(module)
    if config.precision != "fp32":
        keep_norms_fp32(module)
    return module


def _refuse_sparse_gradients(config: TrainConfig, module: nn.Module) -> None:
    """Makes embeddings give dense gradients where a part of a network's gradients has no whole rows."""
    # The exchange of whole gradients sends rows of embeddings, and refuses other sparse ones by itself.
    if config.num_workers == 1 or _exchange(config).strategy in ("data_parallel", "compressed"):
        return
    for layer in module.modules():
        if isinstance(layer, nn.Embedding | nn.EmbeddingBag):
            layer.sparse = False
    for name, parameter in module.named_parameters():
        if parameter.requires_grad:
            parameter.register_hook(partial(refuse_sparse, name))  # type: ignore[no-untyped-call]


def _final_weights(
    config: TrainConfig, mesh: Mesh, state: TrainingState, best: BestCheckpoint | None, status: Status
) -> tuple[str, int]:
    """Returns the folder of the resulting weights and their epoch; writes them. Runs on every rank."""
    if best is not None and best.uri is not None:
        if mesh.writes:
            best.remove_others()
        return best.uri, best.epoch
    status.phase = "writing the checkpoint"
    for parameter in state.module.parameters():
        parameter.grad = None  # no step follows; a tensor on its way to the first rank takes their place
    uri = storage.join(config.run_uri, run_layout.CHECKPOINT)
    with state.averaged():
        save_together(uri, state.module, mesh, status.tick, epoch=state.epoch, step=state.step)
    return uri, state.epoch


def _callbacks(config: TrainConfig, objects: UserObjects, best: BestCheckpoint | None) -> Callbacks:
    callbacks = [*objects.callbacks]
    if best is not None:
        callbacks.append(best)
    if config.patience is not None:
        callbacks.append(EarlyStopping(config, config.patience))
    return Callbacks(callbacks)


def _open_readers(
    config: TrainConfig, mesh: Mesh, manifest: ShardManifest, opened: ExitStack
) -> tuple[ShardReader, ShardReader | None]:
    def opening(split: Split, **settings: Any) -> ShardReader:
        kept = caching(config, manifest, split, mesh.data_rank, mesh.data_size)
        return opened.enter_context(closing(open_reader(manifest.select(split), **settings, **kept)))

    columns = [manifest.column_of(name).name for name in config.columns]
    shared: dict[str, Any] = {
        "columns": list(dict.fromkeys(columns)),
        "shard": mesh.data_rank,
        "num_shards": mesh.data_size,
        "seed": config.seed,
        "engine": config.reader,
    }
    train = opening("train", batch_size=config.batch_sizes.size, shuffle=config.shuffle, **shared)
    held_out = manifest.select("validation").num_rows
    return train, opening("validation", batch_size=config.batch_size, **shared) if held_out else None
