"""`train_worker`, which every rank runs, inside Spark or without it."""

from __future__ import annotations

from contextlib import ExitStack, closing
from dataclasses import dataclass, field, replace
from typing import Any

import torch

from ringspark.estimators import run_layout
from ringspark.estimators.collectives import Collective
from ringspark.estimators.options.privacy import PrivacySpent
from ringspark.estimators.parallel.mesh import RankMesh
from ringspark.estimators.techniques import first_made, techniques_of
from ringspark.estimators.training.batch_sizes import Steps
from ringspark.estimators.training.callbacks import Callbacks, TrainingState
from ringspark.estimators.training.checkpoint.resume import Recovery
from ringspark.estimators.training.checkpoint.weights import save_together
from ringspark.estimators.training.compilation import compile_network
from ringspark.estimators.training.history import EpochRecord, RunLog, SettingChange
from ringspark.estimators.training.make_heads import make_heads
from ringspark.estimators.training.non_finite import NonFiniteStep
from ringspark.estimators.training.observation.observation import Observation
from ringspark.estimators.training.optimizers.rate_scaling import RateScaling
from ringspark.estimators.training.optimizers.schedules import make_rates
from ringspark.estimators.training.phase import Status
from ringspark.estimators.training.rank_network import RankNetwork
from ringspark.estimators.training.row_caching import cache_options
from ringspark.estimators.training.run_environment import record_memory, record_start
from ringspark.estimators.training.selection import BestCheckpoint, EarlyStopping, TimeBudget, calibrated
from ringspark.estimators.training.settings.config import TrainConfig, UserObjects
from ringspark.estimators.training.train_state import TrainState
from ringspark.estimators.training.trainer import Trainer
from ringspark.models.generators import keep_shared_generators, seed_rank
from ringspark.pipelines import ShardManifest, open_reader, storage
from ringspark.pipelines.manifest import Split
from ringspark.pipelines.readers import ShardReader
from ringspark.pipelines.typed_json import JsonText


@dataclass(frozen=True, kw_only=True)
class TrainResult(JsonText):
    """The result that returns through Spark: a few kilobytes, never weights.

    Attributes:
        seconds: Training time of the first start and all resumes, without steps that a failure lost.
        checkpoint_errors: One sentence per checkpoint that rank 0 could not write.
    """

    allow_nan = True  # a loss that overflowed
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
    privacy: PrivacySpent | None = None


@dataclass(frozen=True, kw_only=True)
class FinishedRun(JsonText):
    """The record of a finished run, `result.json`.

    Holds the result of rank 0, why workers restarted, what the cluster took away, the seconds without a step
    after all of that, and which settings changed.
    """

    allow_nan = True
    result: TrainResult
    restarts: tuple[str, ...] = ()
    preemptions: tuple[str, ...] = ()
    seconds_lost: float = 0.0
    parallelism: dict[str, Any] = field(default_factory=dict)
    changes: tuple[SettingChange, ...] = ()


def train_worker(
    config: TrainConfig,
    collective: Collective,
    objects: UserObjects | None = None,
    device: str = "cpu",
    status: Status | None = None,
) -> TrainResult:
    """Trains the config's model on the config's shards. Runs on every rank.

    `objects` holds the user's module and callables. `status` receives the phase of this rank. The collective
    stays open.
    """
    objects = objects or UserObjects()
    status = status or Status()
    torch_device = torch.device(device)
    gpus = [torch_device] if torch_device.type == "cuda" else []
    mesh = replace(RankMesh.of(collective, config.axes), shards_state=config.sync.sharding != "none")
    recovery = Recovery(config, mesh, status)
    # Seeds are set only inside the fork, so a reused Python worker keeps its own random state.
    with recovery, torch.random.fork_rng(devices=gpus), keep_shared_generators(), ExitStack() as opened:
        return _train(config, mesh, objects, torch_device, status, recovery, opened)


def _train(
    config: TrainConfig,
    mesh: RankMesh,
    objects: UserObjects,
    device: torch.device,
    status: Status,
    recovery: Recovery,
    opened: ExitStack,
) -> TrainResult:
    status.phase = "opening the shards"
    manifest = ShardManifest.load(config.shards_uri)
    train, validation = _open_readers(config, mesh, manifest, opened)
    network = RankNetwork(config, objects, manifest, mesh, device, status)
    network.build()
    network.shard()
    network.recompute()
    sync = network.wrap()
    # Dropout differs between ranks, as it does between the rows of one batch.
    seed_rank(config.seed, 0, mesh.random_stream)
    best, stop, budget = None, None, None
    if config.keep == "best":
        best = BestCheckpoint(config, mesh, status, keeps_worse=recovery.schedule.is_enabled)
    if config.patience is not None:
        stop = EarlyStopping(config, config.patience)
    if config.time_budget_seconds is not None:
        budget = TimeBudget(config.time_budget_seconds, lambda: recovery.seconds)
    # A resume may have another budget, so no checkpoint keeps it.
    callbacks = Callbacks([*objects.callbacks, *filter(None, (best, stop))], stateless=budget)
    steps = Steps(config.batch_sizes, train.manifest.num_rows)
    start = record_start(config, mesh, manifest, device)
    # Made before a checkpoint is loaded, because the rates are relative to the user's rates.
    rates = make_rates(
        objects.lr_schedule or config.lr_schedule,
        sync.optimizer,
        steps.total,
        config.warmup_steps,
        RateScaling.of(config.scale_learning_rate, steps),
    )
    recovery.record(objects, manifest, device)
    status.phase = "comparing the clocks"
    with (
        RunLog(config.run_uri, writes=mesh.writes) as log,
        Observation.of(config, mesh, device) as observation,
        compile_network(sync.network, config.compile, device),
    ):
        heads, stages = make_heads(config, objects, manifest), network.stages
        train_state = TrainState(
            config, mesh, heads, sync, rates, callbacks, log, observation, steps, device, objects, stages
        )
        Trainer(config, mesh, train_state, recovery, status).fit(train, validation)
    recovery.finish()
    state = train_state.state
    checkpoint_uri, checkpoint_epoch = _final_weights(config, mesh, state, best, status)
    recovery.record_end(checkpoint_uri)
    bytes_sent = mesh.world.bytes_sent  # without the record of the memory
    record_memory(config.run_uri, mesh, device, start)
    status.phase = "done"
    return TrainResult(
        run_uri=config.run_uri,
        checkpoint_uri=checkpoint_uri,
        checkpoint_epoch=checkpoint_epoch,
        rows=state.epoch * train.manifest.num_rows,
        steps=state.step,
        seconds=recovery.seconds,
        bytes_sent=bytes_sent,
        lost_state=network.find_changed_buffers(),
        stop_reason=state.stop_reason,
        history=tuple(state.history),
        resumed_steps=recovery.resumed_steps,
        checkpoint_errors=recovery.errors,
        non_finite=tuple(recovery.non_finite),
        privacy=first_made(each.count_privacy(train_state.passes) for each in techniques_of(config)),
    )


def _final_weights(
    config: TrainConfig, mesh: RankMesh, state: TrainingState, best: BestCheckpoint | None, status: Status
) -> tuple[str, int]:
    """Writes the last weights if there is no best checkpoint; returns the weights' folder and epoch."""
    if best is not None and best.uri is not None:
        if mesh.writes:
            best.remove_others()
        return best.uri, best.epoch
    status.phase = "writing the checkpoint"
    for parameter in state.module.parameters():
        parameter.grad = None  # no step follows, so a tensor sent to the first rank can use its memory
    uri = storage.join(config.run_uri, run_layout.CHECKPOINT)
    with state.averaged(), calibrated(state.module, state.history[-1] if state.history else None):
        save_together(uri, state.module, mesh, status.tick, epoch=state.epoch, step=state.step)
    return uri, state.epoch


def _open_readers(
    config: TrainConfig, mesh: RankMesh, manifest: ShardManifest, opened: ExitStack
) -> tuple[ShardReader, ShardReader | None]:
    def open_split(split: Split, **settings: Any) -> ShardReader:
        cached = cache_options(config, manifest, split, mesh.data.rank, mesh.data.size)
        return opened.enter_context(closing(open_reader(manifest.select(split), **settings, **cached)))

    columns = [manifest.column_of(name).name for name in config.columns]
    shared: dict[str, Any] = {
        "columns": list(dict.fromkeys(columns)),
        "shard": mesh.data.rank,
        "num_shards": mesh.data.size,
        "seed": config.seed,
        "engine": config.reader,
    }
    train = first_made(each.open_reader(config, manifest, shared) for each in techniques_of(config))
    if train is None:
        train = open_split("train", batch_size=config.batch_sizes.size, shuffle=config.shuffle, **shared)
    else:
        opened.enter_context(closing(train))
    held_out = manifest.select("validation").num_rows
    return train, open_split("validation", batch_size=config.batch_size, **shared) if held_out else None
