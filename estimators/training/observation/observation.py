"""The observers of a training: losses and cost; on request the timeline and a profile."""

from __future__ import annotations

import logging
import tempfile
import time
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from ringspark.estimators import run_layout
from ringspark.estimators.parallel.mesh import RankMesh
from ringspark.estimators.techniques import first_made, techniques_of
from ringspark.estimators.training.callbacks import TrainingState
from ringspark.estimators.training.feed import Batch
from ringspark.estimators.training.observation.background_file import BackgroundFile
from ringspark.estimators.training.observation.epoch_meter import EpochMeter
from ringspark.estimators.training.observation.overlap import StepOverlap
from ringspark.estimators.training.observation.timeline import Timeline
from ringspark.estimators.training.settings.config import TrainConfig
from ringspark.estimators.training.step_log import StepLog
from ringspark.pipelines import storage

_log = logging.getLogger(__name__)

_NOTHING: AbstractContextManager[None] = nullcontext()


class Profiler:
    """Writes the torch.profiler trace of steps `first` to `last`; training continues if the profiler fails.

    Only rank 0 is profiled: all ranks run the same program, and wait for the profiled rank.
    """

    def __init__(self, run_uri: str, first: int, last: int, device: torch.device) -> None:
        self._first, self._last = first, last
        self._activities = [torch.profiler.ProfilerActivity.CPU]
        if device.type == "cuda":
            self._activities.append(torch.profiler.ProfilerActivity.CUDA)
        # A resumed training may take these steps again.
        name = f"rank-0-steps-{first}-{last}-{time.time_ns() // 1_000_000}.json.gz"
        self._file = BackgroundFile(storage.join(run_uri, run_layout.PROFILE, name), "profile")
        self._profile: Any = None
        self._is_done = False

    def steps(self, batches: Iterator[Batch], state: TrainingState) -> Iterator[Batch]:
        for batch in batches:
            is_idle = self._profile is None and not self._is_done
            if is_idle and self._first <= state.step + 1 <= self._last:
                with self._warnings():
                    profile = torch.profiler.profile(activities=self._activities)
                    profile.start()
                    self._profile = profile
            yield batch
            if self._profile is not None and state.step >= self._last:
                self._end()

    def close(self) -> None:
        if self._profile is not None:
            self._end()
        self._file.close()

    def _end(self) -> None:
        profile, self._profile, self._is_done = self._profile, None, True
        with self._warnings(), tempfile.TemporaryDirectory(prefix="ringspark-profile-") as folder:
            profile.stop()
            path = Path(folder, "trace.json.gz")
            profile.export_chrome_trace(str(path))
            data = path.read_bytes()
            self._file.write(lambda: data)

    @contextmanager
    def _warnings(self) -> Iterator[None]:
        try:
            yield
        except Exception as error:  # the machine's tracing library may raise any exception
            self._is_done = True
            _log.warning("torch.profiler failed (%s); training continues without a profile", error)


@dataclass(frozen=True, kw_only=True)
class Observation(AbstractContextManager["Observation"]):
    """The observers of one rank's steps; a context manager that writes their files at its end."""

    losses: StepLog
    meter: EpochMeter
    timeline: Timeline
    overlap: StepOverlap | None = None
    profiler: Profiler | None = None

    @classmethod
    def of(cls, config: TrainConfig, mesh: RankMesh, device: torch.device) -> Observation:
        made = (each.make_timeline(config, mesh, device) for each in techniques_of(config))
        timeline: Timeline = first_made(made) or Timeline()
        overlap = None
        # A GPU continues to compute after the host's call returns, so the overlap is unknown.
        if mesh.world.size > 1 and device.type == "cpu":
            is_pipeline = mesh.sizes.get("pipeline", 1) > 1
            overlap = StepOverlap(mesh.world, timeline, is_pipeline=is_pipeline)
        profiler = None
        if config.profile_steps is not None and mesh.writes:
            profiler = Profiler(config.run_uri, *config.profile_steps, device)
        return cls(
            losses=StepLog(config.run_uri, mesh.writes, 0 if config.hides_rows else config.log_every_steps),
            meter=EpochMeter(config, mesh, device, overlap),
            timeline=timeline,
            overlap=overlap,
            profiler=profiler,
        )

    def steps(self, batches: Iterator[Batch], state: TrainingState) -> Iterator[Batch]:
        batches = self.timeline.steps(batches, state)
        if self.profiler is not None:
            batches = self.profiler.steps(batches, state)
        return self.meter.steps(batches)

    def step(self, number: int, num_steps: int) -> AbstractContextManager[None]:
        """Returns a context for step `number`, from 0, of the epoch's `num_steps`."""
        return _NOTHING if self.overlap is None else self.overlap.step(number, num_steps)

    def __exit__(self, *_: object) -> None:
        if self.profiler is not None:
            self.profiler.close()
        self.timeline.close()
        # The folder may be removed after this.
        self.losses.flush()
