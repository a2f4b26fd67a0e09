"""The present state of one rank's training: the loop changes it, and checkpoints copy it."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import torch

from ringspark.estimators.parallel.base import GradientSync
from ringspark.estimators.parallel.layout import layout_of
from ringspark.estimators.parallel.mesh import RankMesh
from ringspark.estimators.techniques import FUNCTIONS, first_made, techniques_of
from ringspark.estimators.training.average import Average
from ringspark.estimators.training.batch_sizes import Steps
from ringspark.estimators.training.batch_transforms import BatchTransform, prepare_function, takes
from ringspark.estimators.training.callbacks import Callbacks, TrainingState
from ringspark.estimators.training.checkpoint.attributes import read_attributes
from ringspark.estimators.training.history import RunLog
from ringspark.estimators.training.non_finite import FirstBadLoss
from ringspark.estimators.training.objective.criterion import Criterion
from ringspark.estimators.training.objective.heads import Head
from ringspark.estimators.training.objective.sums import Sums
from ringspark.estimators.training.observation.observation import Observation
from ringspark.estimators.training.optimizers.schedules import LearningRates
from ringspark.estimators.training.passes import OwnStep, Passes, Stages, WholePasses
from ringspark.estimators.training.precision import LossScaler
from ringspark.estimators.training.settings.config import TrainConfig, UserObjects
from ringspark.estimators.training.step import Recipe


class TrainState:
    """Everything on one rank that changes from step to step, and the position of the training.

    `epoch_start` is a value of `time.monotonic`; a resume moves it, so that the pause does not count.
    `skipped_before` counts the steps that were skipped before the current epoch.
    """

    def __init__(
        self,
        config: TrainConfig,
        mesh: RankMesh,
        heads: Sequence[Head],
        sync: GradientSync,
        rates: LearningRates,
        callbacks: Callbacks,
        log: RunLog,
        observation: Observation,
        steps: Steps,
        device: torch.device,
        objects: UserObjects,
        stages: Stages | None = None,
    ) -> None:
        guards = config.on_non_finite != "stop"
        # Ranks hold different gradient shards or losses, so they must agree on which steps to skip.
        combine = partial(mesh.world.all_reduce, op="max") if sync.ranks_differ or guards else None
        self.transform: BatchTransform | None = None
        if objects.transform_batch is not None:
            self.transform = BatchTransform(objects.transform_batch, config.seed, mesh.data.rank, device)
        self.observation = observation
        self.prepare = prepare_function(objects.transform_in_prediction, device, training=False)
        layout, techniques = layout_of(sync.network), techniques_of(config)
        self.scaler = LossScaler(
            config.precision, device, combine, guards=guards, compression=config.activation_compression
        )
        self.recipe = Recipe(
            config=config,
            criterion=Criterion(heads, device, None if layout is None else layout.class_shards),
            scaler=self.scaler,
            device=device,
            timeline=observation.timeline,
        )
        # In training mode an ensemble returns the logits of its members, not a prediction.
        predicts = not any(head.is_per_member for head in heads)
        # Labels that a transform has mixed belong to no single row.
        predicts = predicts and not takes(objects.transform_batch, "labels") and not config.hides_rows
        counted: dict[str, Any] = {}
        if stages is not None:
            counted = {"layers": stages.layers, "stages": mesh.axes["pipeline"]}
        arguments = (config, objects, sync, self.scaler, mesh, device)
        self.own_step: OwnStep | None = first_made(each.make_step(*arguments) for each in techniques)
        if self.own_step is not None:
            # Its loss is one number, the first head's; and it keeps no outputs of training rows.
            predicts = False
            heads = [replace(head, weight=float(not index)) for index, head in enumerate(heads)]
        self.sums = Sums("train", heads, device, sync.network, with_metrics=predicts, **counted)
        self.validation = Sums("validation", heads, device, sync.network, **counted)
        self.noise = FUNCTIONS["noise_meter"](sync, mesh.data) if config.noise_scale else None
        self.attributes = read_attributes(sync.network)
        self.state: TrainingState
        passes: Passes | None = first_made(
            each.make_passes(self.recipe, sync, mesh, steps, lambda: self.state.step) for each in techniques
        )
        if passes is None and stages is not None:
            passes = stages.make_passes(self.recipe, sync, mesh)
        measure = self.noise.micro_batch if self.noise else None
        self.passes = passes or WholePasses(self.recipe, sync, observation.meter.counting, measure)
        self.average = Average(sync.network, config.ema_decay, sync.optimizer)
        self.state = TrainingState(
            rank=mesh.world.rank,
            size=mesh.world.size,
            module=sync.network,
            optimizer=sync.optimizer,
            num_steps=steps.total,
            history=log.history,
            averaged=self.average.in_place,
        )
        self.sync, self.rates, self.callbacks, self.log = sync, rates, callbacks, log
        self.device, self.steps, self.first_bad = device, steps, FirstBadLoss(device)
        self.finished_epochs = self.step_in_epoch = self.skipped_before = 0
        self.epoch_start = time.monotonic()

    def end_epoch(self) -> None:
        self.finished_epochs += 1
        self.step_in_epoch = 0
        self.skipped_before = self.scaler.skipped_steps
        self.epoch_start = time.monotonic()
