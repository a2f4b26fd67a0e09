"""The observers of a training: losses and cost; on request the timeline and a profile."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch

from ringspark.estimators.lazy_imports import load_object
from ringspark.estimators.parallel.mesh import RankMesh
from ringspark.estimators.training.callbacks import TrainingState
from ringspark.estimators.training.feed import Batch
from ringspark.estimators.training.observation.epoch_meter import EpochMeter
from ringspark.estimators.training.observation.overlap import NO_OVERLAP, Overlap, StepOverlap
from ringspark.estimators.training.observation.profiler import NO_PROFILER, Profiler, make_profiler
from ringspark.estimators.training.observation.timeline import NO_TIMELINE, RANK_TIMELINE, Timeline
from ringspark.estimators.training.settings.config import TrainConfig
from ringspark.estimators.training.step_log import StepLog


@dataclass(frozen=True, kw_only=True)
class Observation:
    """The observers of one rank's steps; a context manager that writes their files at its end."""

    losses: StepLog
    meter: EpochMeter
    timeline: Timeline = NO_TIMELINE
    overlap: Overlap = NO_OVERLAP
    profiler: Profiler = NO_PROFILER

    @classmethod
    def of(
        cls, config: TrainConfig, mesh: RankMesh, device: torch.device, *, is_compiled: bool = False
    ) -> Observation:
        timeline: Timeline = NO_TIMELINE
        if config.timeline_every_steps is not None:
            make = load_object(RANK_TIMELINE)
            timeline = make(config.timeline_every_steps, mesh.world, config.run_uri, device)
        overlap: Overlap = NO_OVERLAP
        if mesh.world.size > 1 and device.type == "cpu":
            is_pipeline = mesh.sizes.get("pipeline", 1) > 1
            overlap = StepOverlap(mesh.world, timeline, is_pipeline=is_pipeline)
            timeline = overlap.timeline
        return cls(
            losses=StepLog(config.run_uri, mesh.writes, config.log_every_steps),
            meter=EpochMeter(
                mesh.world,
                device,
                precision=config.precision,
                is_compiled=is_compiled,
                overlap=overlap,
                ranks_per_copy=mesh.replica.size,
            ),
            timeline=timeline,
            overlap=overlap,
            profiler=make_profiler(config, mesh, device),
        )

    def steps(self, batches: Iterator[Batch], state: TrainingState) -> Iterator[Batch]:
        return self.meter.steps(self.profiler.steps(self.timeline.steps(batches, state), state))

    def __enter__(self) -> Observation:
        return self

    def __exit__(self, *_: object) -> None:
        self.profiler.close()
        self.timeline.close()
        # The folder may be removed after this.
        self.losses.flush()
