"""Profiles a few steps of rank 0 with torch.profiler; the other ranks run the same program."""

from __future__ import annotations

import logging
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

from ringspark.estimators import run_layout
from ringspark.estimators.parallel.mesh import RankMesh
from ringspark.estimators.training.callbacks import TrainingState
from ringspark.estimators.training.feed import Batch
from ringspark.estimators.training.observation.background_file import BackgroundFile
from ringspark.estimators.training.settings.config import TrainConfig
from ringspark.pipelines import storage

_log = logging.getLogger(__name__)


class Profiler:
    def steps(self, batches: Iterator[Batch], state: TrainingState) -> Iterator[Batch]:
        """Yields the batches of an epoch's steps, and profiles the chosen steps."""
        return batches

    def close(self) -> None:
        """Ends a profile whose last step the training did not take."""


NO_PROFILER = Profiler()


def make_profiler(config: TrainConfig, mesh: RankMesh, device: torch.device) -> Profiler:
    if config.profile_steps is None or not mesh.writes:
        return NO_PROFILER
    return StepProfiler(config.run_uri, *config.profile_steps, device)


class StepProfiler(Profiler):
    """Writes the trace of steps `first` to `last`; a failing profiler ends no training."""

    def __init__(self, run_uri: str, first: int, last: int, device: torch.device) -> None:
        self._first = first
        self._last = last
        self._device = device
        # A resumed training may take these steps again.
        name = f"rank-0-steps-{first}-{last}-{time.time_ns() // 1_000_000}.json.gz"
        self._file = BackgroundFile(storage.join(run_uri, run_layout.PROFILE, name), "profile")
        self._profile: Any = None
        self._is_done = False

    def steps(self, batches: Iterator[Batch], state: TrainingState) -> Iterator[Batch]:
        for batch in batches:
            if state.step + 1 >= self._first and not self._is_done and self._profile is None:
                self._begin(state.step + 1)
            yield batch
            if self._profile is not None and state.step >= self._last:
                self._end()

    def close(self) -> None:
        if self._profile is not None:
            self._end()
        self._file.close()

    def _begin(self, step: int) -> None:
        self._is_done = step > self._last  # the training was resumed after them
        if self._is_done:
            return
        activities = [torch.profiler.ProfilerActivity.CPU]
        if self._device.type == "cuda":
            activities.append(torch.profiler.ProfilerActivity.CUDA)
        try:
            profile = torch.profiler.profile(activities=activities)
            profile.start()
        except Exception as error:  # the machine's tracing library may raise any exception
            self._give_up(error)
            return
        self._profile = profile

    def _end(self) -> None:
        profile, self._profile, self._is_done = self._profile, None, True
        try:
            profile.stop()
            with tempfile.TemporaryDirectory(prefix="ringspark-profile-") as folder:
                path = Path(folder, "trace.json.gz")
                profile.export_chrome_trace(str(path))
                data = path.read_bytes()
        except Exception as error:
            self._give_up(error)
            return
        self._file.write(lambda: data)

    def _give_up(self, error: Exception) -> None:
        self._is_done = True
        _log.warning("torch.profiler failed (%s); training continues without a profile", error)
